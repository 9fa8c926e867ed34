"""Claims of the first chapter and of the cover, computed afresh."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dist_lib.claims import load_claims, recomputers, recomputes
from dist_lib.comm import CommCounter, ExactReducer, NetworkModel, launch
from dist_lib.models import (
    Decoder,
    SavedTensorCounter,
    activation_bytes,
    get_config,
    parameter_counts,
    training_flops,
)
from dist_lib.step_model import Scenario, activation_layer_units, patch_bytes, timeline
from dist_lib.tasks import BatchSampler, load_corpus

TINY, ROWS, SEQ = get_config("tiny-0.3m"), 8, 64


def sampler() -> BatchSampler:
    return BatchSampler(load_corpus().train, batch_size=ROWS, seq_len=SEQ, seed=0)


@recomputes("baseline-llama2-7b-parameters")
def llama2_parameters() -> float:
    return parameter_counts(get_config("llama2-7b")).total


@recomputes("baseline-flops-counted")
def flops_counted() -> float:
    model = Decoder(TINY)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.loss(*sampler().batch(0)).backward()
    return counter.get_total_flops() / training_flops(TINY, ROWS, SEQ).total


@recomputes("baseline-held-bytes-counted")
def held_bytes_counted() -> float:
    model = Decoder(TINY)
    with SavedTensorCounter(model) as counter:
        model.loss(*sampler().batch(0))
    return counter.bytes / activation_bytes(TINY, ROWS, SEQ)


@recomputes("baseline-adamw-bytes")
def adamw_bytes() -> float:
    model = Decoder(TINY)
    optimizer = torch.optim.AdamW(model.parameters())
    model.loss(*sampler().batch(0)).backward()
    optimizer.step()
    moments = sum(v.nbytes for s in optimizer.state.values() for k, v in s.items() if k != "step")
    held = sum(p.nbytes + p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return (held + moments) / parameter_counts(TINY).total


@recomputes("baseline-six-nt-7b")
def six_n_t() -> float:
    config = get_config("llama2-7b")
    return training_flops(config, 1, 4096).total / (6 * parameter_counts(config).total * 4096)


def train(shards: int, mine: list[int] | None) -> tuple[list[torch.Tensor], int]:
    """Five AdamW steps; ``mine`` are this process's shards (None: its rank's own). Weights, and bytes of a step."""
    world = torch.distributed.get_world_size() if mine is None else 1
    chosen = mine if mine is not None else [torch.distributed.get_rank()]
    model, batches = Decoder(TINY, seed=0), sampler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    counted = 0
    for step in range(5):
        optimizer.zero_grad()
        loss_sum = torch.zeros(())
        for shard in chosen:
            tokens, targets = batches.shard(step, shard, shards)
            loss = model.loss(tokens, targets) * (len(tokens) / ROWS)
            loss.backward()
            loss_sum += loss.detach()
        if world > 1:
            with CommCounter() as counter:
                flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
                ExactReducer(ordered=True).all_reduce(flat, average=False)
                ExactReducer(ordered=True).all_reduce(loss_sum, average=False)
            counted = counter.bytes()
            parts = flat.split([p.numel() for p in model.parameters()])
            for p, part in zip(model.parameters(), parts, strict=True):
                p.grad.copy_(part.view_as(p))  # type: ignore[union-attr]
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], counted


@recomputes("baseline-twin-bits")
def twin_bits() -> float:
    differing = 0
    for world in (2, 4):
        twin, _ = train(world, list(range(world)))
        for weights, _ in launch(train, world_size=world, args=(world, None)):
            differing += sum(int((a != b).sum()) for a, b in zip(twin, weights, strict=True))
    return differing


@recomputes("baseline-payload-bytes")
def payload_bytes() -> float:
    counted = {n for _, n in launch(train, world_size=2, args=(2, None))}
    assert len(counted) == 1
    return counted.pop() / (4 * parameter_counts(TINY).total + 4)


@recomputes("baseline-mean-of-means")
def mean_of_means() -> float:
    model = Decoder(TINY, seed=0)
    tokens, targets = sampler().batch(0)

    def gradient(rows: slice) -> torch.Tensor:
        model.zero_grad()
        model.loss(tokens[rows], targets[rows]).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    right = gradient(slice(0, 8))
    wrong = (gradient(slice(0, 7)) + gradient(slice(7, 8))) / 2
    return 100 * float((wrong - right).norm() / right.norm())


@recomputes("cover-bubble")
def bubble() -> float:
    free = Scenario(network=NetworkModel(0.0, 1e30), memory_bytes_per_s=1e30)
    return timeline("baseline", free).step_s / timeline("async", free).step_s


@recomputes("agoq-layer-bf16")
def agoq_bf16() -> float:
    return activation_layer_units(replace(get_config("llama2-7b"), d_ff=4 * 4096))


@recomputes("agoq-layer-4bit")
def agoq_4bit() -> float:
    return activation_layer_units(replace(get_config("llama2-7b"), d_ff=4 * 4096), quantised_bits=4)


@recomputes("pulse-patch-entropy")
def patch_entropy() -> float:
    return 2 / patch_bytes(1.0, 0.01)


MINE = sorted(name for name, fn in recomputers().items() if fn.__module__ == __name__)


@pytest.mark.parametrize("name", MINE)
def test_the_ledger_says_what_the_code_computes(name: str) -> None:
    claim, found = load_claims()[name], recomputers()[name]()
    assert claim.agrees(found), f"{name}: the ledger says {claim.our_value}, the code {found}"
