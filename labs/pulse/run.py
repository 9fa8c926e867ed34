"""A trainer whose changed bits are published, followers that hold the same weights, and workers that train apart.

First GRPO on additions: each step is a version in a store, the sampler acts with what it received, and patches of three
codecs are measured on the same changes. Then PULSELoCo, dense DiLoCo and data parallelism on the same problems: what
each worker sends, counted and by formula, and what is learned.
"""

from __future__ import annotations

from typing import Any

import torch

from dist_lib.comm import agree, collectives
from labs.framework import Lab, RunContext
from labs.pulse.config import Config
from labs.pulse.outer import Outcome, train
from labs.pulse.plots import figures
from labs.pulse.sync import train_and_publish


def run(config: Config, context: RunContext) -> dict[str, Any]:
    """Publish and follow, then train apart; called on every rank."""
    agree(config, what="the configuration")
    loops = config.compared if config.rounds else ()
    each = config.rounds * config.inner_steps
    total = config.steps + each * len(loops)
    state: dict[str, Any] = context.load_state() or {}
    if "found" not in state:
        found = train_and_publish(config, context, total, state if "trainer" in state else None)
        state = {"found": found, "outcomes": {}}
        context.save_state(state)
    for index, name in enumerate(loops):
        done = state["outcomes"].get(name, {})
        if not done.get("digest"):
            outcome = train(name, config, context, config.steps + index * each, total, state)
            state["outcomes"][name] = vars(outcome)
            context.save_state(state)
    outcomes = {name: Outcome(**found) for name, found in state["outcomes"].items()}
    metrics: dict[str, Any] = state["found"] | loop_metrics(outcomes, context)
    return metrics


def loop_metrics(outcomes: dict[str, Outcome], context: RunContext) -> dict[str, Any]:
    """Accuracy, bytes against formulas and ranks with the same bits, for each outer loop. Collective."""
    found: dict[str, Any] = {}
    for name, outcome in outcomes.items():
        formula = [outcome.total("counted") == outcome.total("formula")]
        agreed = collectives.all_reduce(torch.tensor(int(all(formula)), device=context.device))
        found |= {
            f"{name}_accuracy": outcome.accuracy,
            f"{name}_bytes_of_a_rank": outcome.total("counted"),
            f"{name}_ranks_with_bytes_of_the_formula": f"{int(agreed)} of {context.dist.world_size}",
        }
        if name == "pulse":
            payload = outcome.total("payload")
            found |= {
                "pulse_sent_percent": 100 * outcome.mean("gate"),
                "pulse_sent_by_any_percent": 100 * outcome.mean("union"),
                "pulse_dense_over_payload": outcome.total("dense") / payload if payload else float("nan"),
            }
    return found


LAB = Lab("pulse", "Only the bits that changed travel", Config, run, figures)

if __name__ == "__main__":
    from labs.cli import lab_main

    lab_main(LAB)
