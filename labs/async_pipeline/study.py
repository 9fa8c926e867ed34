"""The small language-model study of delayed gradients: ``python -m labs.async_pipeline.study``.

A LLaMA-style decoder of 0.13 million parameters learns bytes of source text, with gradients of the current weights,
with gradients one update old, and with each correction, all with the same hyperparameters. One run takes less than a
minute on one core; the record is written after each, and a study that was stopped goes on where it was. The scale is
a toy's: what holds in this table need not hold for a large model, nor the other way round.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dist_lib import results
from dist_lib.async_pipeline.config import AsyncConfig
from dist_lib.async_pipeline.emulator import DelayedTrainer
from dist_lib.async_pipeline.mitigations import DCASGD, GradientExtrapolation, WeightPrediction
from dist_lib.async_pipeline.stages import split_decoder
from dist_lib.models import Decoder, DecoderConfig
from dist_lib.optim import warmup_cosine
from dist_lib.tasks import BatchSampler, TextCorpus, load_corpus
from labs.async_pipeline.study_plan import Named, Run, best_rates, make_optimizer, plan, sweep_runs
from labs.async_pipeline.study_report import report

RECORD = Path(__file__).resolve().parents[2] / "data" / "results" / "async-study.json"
MODEL = DecoderConfig(vocab_size=256, d_model=64, n_layers=2, n_heads=4, n_kv_heads=4, d_ff=176, max_seq_len=32)
CONTEXT, CLIP, FINAL_LR, VAL_ROWS, VAL_BATCHES, QUARTER_BATCHES = 32, 1.0, 0.1, 128, 32, 4
DELAYS: dict[str, int | tuple[int, ...]] = {"sync": 0, "pipedream4": (3, 2, 1, 0), "pipedream16": (15, 10, 5, 0)}
PIPEDREAM_LAYERS = [0, 1, 1, 0]  # embedding; a layer; a layer; norm and head
Validate = Callable[[Decoder, int], float]


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token; logits (B, S, V), targets (B, S)."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def held_out(corpus: TextCorpus) -> Tensor:
    """The held-out text without the lines of one file's generated tables (``uk_``): 1-D uint8.

    They are a third of it, nothing in the training text is like them, and their loss would drown the differences that
    the study is about.
    """
    lines = bytes(corpus.val.tolist()).splitlines(keepends=True)
    return torch.frombuffer(bytearray(b"".join(line for line in lines if b"uk_" not in line)), dtype=torch.uint8)


def validation(corpus: TextCorpus) -> Validate:
    """A function of a model and a number of batches: its mean loss on fixed windows of held-out text."""
    sampler = BatchSampler(held_out(corpus), batch_size=VAL_ROWS, seq_len=CONTEXT, seed=12345)
    batches = [sampler.batch(i) for i in range(VAL_BATCHES)]

    @torch.no_grad()
    def loss(model: Decoder, count: int) -> float:
        return sum(float(model.loss(x, y)) for x, y in batches[:count]) / count

    return loss


def make_trainer(run: Run, model: Decoder) -> DelayedTrainer:
    """The emulator for a run."""
    stages = 4 if run.mode.startswith("pipedream") else 1
    factor = warmup_cosine(total_steps=run.steps, warmup_steps=run.steps // 10, final=FINAL_LR)

    def optimizer(named: Named) -> Optimizer:
        inner = make_optimizer(run, named)
        if run.mode == "extrapolation":
            return GradientExtrapolation(inner)
        return DCASGD(inner) if run.mode == "dc_asgd" else inner

    return DelayedTrainer(
        split_decoder(model, stages, layers=PIPEDREAM_LAYERS if stages == 4 else None),
        loss_fn=next_token_loss,
        make_optimizer=optimizer,
        make_scheduler=lambda o: LambdaLR(o, factor),
        config=AsyncConfig(
            micro_batches=1, delay=DELAYS.get(run.mode, 1), clip_norm=CLIP, error_feedback=run.mode == "ef"
        ),
        sync_updates=run.steps // 5 if run.mode == "sync_start" else 0,
        prediction=WeightPrediction() if run.mode == "prediction" else None,
    )


def train(run: Run, corpus: TextCorpus, validate: Validate) -> dict[str, Any]:
    """One run: settings and what came out.

    Returns:
        The run's fields, ``loss`` (validation, at the end; None if it diverged), ``quarters`` (on less text, at each
        quarter), ``train_loss`` (mean of the last tenth of the steps, at the weights of the gradients) and ``seconds``.
    """
    begin = time.perf_counter()
    model = Decoder(MODEL, seed=run.seed)
    trainer = make_trainer(run, model)
    sampler = BatchSampler(corpus.train, batch_size=run.batch, seq_len=CONTEXT, seed=run.seed)
    quarters: list[float | None] = []
    train_losses: list[float] = []
    for step in range(run.steps):
        loss = trainer.train_batch(*sampler.batch(step))
        if not math.isfinite(loss):
            break
        train_losses.append(loss)
        if 4 * (step + 1) // run.steps > len(quarters):
            quarters.append(_finite(validate(model, QUARTER_BATCHES)))
    final = _finite(validate(model, VAL_BATCHES)) if len(quarters) == 4 else None
    last = train_losses[-max(1, run.steps // 10) :]
    return {
        **asdict(run),
        "loss": final,
        "quarters": quarters,
        "train_loss": sum(last) / len(last) if final is not None else None,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def settings() -> dict[str, Any]:
    """What all runs share, as plain data."""
    return {
        "model": asdict(MODEL),
        "parameters": sum(p.numel() for p in Decoder(MODEL).parameters()),
        "context": CONTEXT,
        "clip_norm": CLIP,
        "warmup": "a tenth of the steps",
        "final_lr_factor": FINAL_LR,
        "weight_decay": "0.1, decoupled, on matrices",
        "validation": "held-out files, without the lines that contain uk_",
        "validation_tokens": VAL_ROWS * VAL_BATCHES * CONTEXT,
        "validation_tokens_of_quarters": VAL_ROWS * QUARTER_BATCHES * CONTEXT,
        "threads": 1,
    }


class Study:
    """The record on disk, and the runs that it lacks.

    Args:
        path: of the record.
        tell: called with a line about each run.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self.path, self.tell = path, tell
        self.data: dict[str, Any] = {"settings": settings(), "runs": {}}
        if path.exists():
            self.data = json.loads(path.read_text(encoding="utf-8"))
            if self.data["settings"] != settings():
                raise typer.BadParameter(f"{path} was made with other settings; give another --out")
        self.corpus = load_corpus()
        self.validate = validation(self.corpus)

    @property
    def losses(self) -> dict[str, float | None]:
        """Loss by key of the runs that are done."""
        return {key: run["loss"] for key, run in self.data["runs"].items()}

    def do(self, runs: list[Run]) -> None:
        """Train what is missing, and write the record after each run."""
        missing = [run for run in runs if run.key not in self.data["runs"]]
        for index, run in enumerate(missing):
            done = train(run, self.corpus, self.validate)
            self.data["runs"][run.key] = done
            self.data |= {"hardware": results.hardware(), "versions": _versions()}
            self.data["rates"] = best_rates(self.losses)
            results.write_text(self.path, json.dumps(self.data, indent=1) + "\n")
            loss = "diverged" if done["loss"] is None else f"{done['loss']:.4f}"
            self.tell(f"{index + 1}/{len(missing)}  {run.key}  {loss}  {done['seconds']:.0f} s")

    def group(self, name: str) -> None:
        """One group of the plan; sweeps the learning rates that it needs first.

        Raises:
            BadParameter: no such group.
        """
        others = ["nadam", "soap", "lion", "adan", "normuon", "mars"]
        needed = {"others": others}.get(name, ["adamw", "muon"])
        for optimizer in needed:  # its runs start before the next one's sweep
            self.do(sweep_runs([optimizer]))
            self._run_group(name)

    def _run_group(self, name: str) -> None:
        groups = plan(best_rates(self.losses))
        if name not in groups:
            raise typer.BadParameter(f"no group {name!r}; there are {', '.join(groups)}")
        self.do(groups[name])


def _versions() -> dict[str, str]:
    import importlib.metadata

    return {**results.versions(), "pytorch-optimizer": importlib.metadata.version("pytorch-optimizer")}


def main(
    runs: Annotated[list[str] | None, typer.Option(help="groups to run, in order; default: all")] = None,
    out: Annotated[Path, typer.Option(help="record to write")] = RECORD,
    resume: Annotated[bool, typer.Option("--resume", help="go on with an existing record")] = False,
    report_only: Annotated[bool, typer.Option("--report", help="print the tables of a record, train nothing")] = False,
) -> None:
    """Run the study group by group, or print what it found."""
    torch.set_num_threads(1)
    console = Console(width=120)
    if report_only:
        if not out.exists():
            raise typer.BadParameter(f"there is no record at {out}; run the study first")
        console.print(
            report(json.loads(out.read_text(encoding="utf-8"))), highlight=False, markup=False, soft_wrap=True
        )
        return
    if out.exists() and not resume:
        raise typer.BadParameter(f"{out} exists; give --resume to go on with it, or another --out")
    study = Study(out, lambda line: console.print(line, highlight=False, soft_wrap=True))
    for name in runs or list(plan({})):
        study.group(name)


if __name__ == "__main__":
    typer.run(main)
