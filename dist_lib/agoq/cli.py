"""``python -m dist_lib.agoq``: where memory would go, and what would fit, before anything is trained.

Each sub-command is a function that adds its parser and sets ``run``, which takes the parsed arguments and returns what
to print. Errors of the caller go to standard error with exit status 2.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dist_lib.agoq.bit_plan import RULES
from dist_lib.agoq.layer_memory import LAYOUT_NAMES
from dist_lib.agoq.memory_model import SYSTEMS, System, Training
from dist_lib.agoq.memory_report import (
    GPUS,
    bits_report,
    bits_text,
    memory_report,
    memory_text,
    paper_report,
    paper_text,
)
from dist_lib.commands import Add, run_command
from dist_lib.models import CONFIGS, get_config


def tokens(text: str) -> int:
    """``"32k"`` or ``"32768"`` as a number of tokens; k is 1024 and m is 1024 k.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    match = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens: give one such as 8192, 32k or 1m")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2]]


def gibibytes(text: str) -> float:
    """A GPU's name, or GiB.

    Raises:
        argparse.ArgumentTypeError: neither.
    """
    if text.lower() in GPUS:
        return float(GPUS[text.lower()])
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no GPU that is known: give GiB, or one of {', '.join(GPUS)}")
    return size


def _training(args: argparse.Namespace) -> Training:
    config = get_config(args.model)
    if args.layers is not None:
        config = replace(config, n_layers=args.layers)
    return Training(
        config=config,
        seq=args.seq,
        micro_batch=args.micro_batch,
        micro_batches=args.micro_batches,
        tensor=args.tp,
        stages=args.pp,
        chunks=args.chunks,
        data=args.dp,
    )


def _write_figure(training: Training, systems: dict[str, System], capacity: int | None, path: Path) -> None:
    try:
        from dist_lib.agoq.figures import device_figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("--figure needs plotly: pip install dist-lib[viz]") from error
    path.write_text(device_figure(training, systems=systems, capacity=capacity).to_html(include_plotlyjs=True))


def run_memory(args: argparse.Namespace) -> str:
    """Model the memory of a training run."""
    training = _training(args)
    systems = {n: replace(s, rule=args.rule) if s.encodes else s for n, s in SYSTEMS.items()}
    capacity = None
    if args.gpu is not None:
        if not 0 <= args.reserve < args.gpu:
            raise ValueError(f"--reserve {args.reserve:g} GiB: give 0 to less than the GPU's {args.gpu:g} GiB")
        capacity = round((args.gpu - args.reserve) * 2**30)
    report = memory_report(training, systems, capacity=capacity)
    if args.figure is not None:
        _write_figure(training, systems, capacity, args.figure)
    return json.dumps(report, indent=2) + "\n" if args.json else memory_text(report, args.model)


def run_bits(args: argparse.Namespace) -> str:
    """Give the bits of stages under every rule."""
    report = bits_report(_training(args), args.layout)
    return json.dumps(report, indent=2) + "\n" if args.json else bits_text(report)


def run_paper(args: argparse.Namespace) -> str:
    """Regenerate the paper's tables."""
    report = paper_report()
    return json.dumps(report, indent=2) + "\n" if args.json else paper_text(report)


def _add_training(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", choices=CONFIGS, metavar="NAME", required=True, help=", ".join(CONFIGS))
    p.add_argument("--layers", type=int, default=None, help="of the model, if other than its own")
    p.add_argument("--seq", type=tokens, required=True, metavar="TOKENS", help="such as 8192 or 32k (k is 1024)")
    p.add_argument("--tp", type=int, default=1, help="ranks of tensor and sequence parallelism (default: 1)")
    p.add_argument("--pp", type=int, default=1, help="pipeline stages (default: 1)")
    p.add_argument("--chunks", type=int, default=1, help="of the model on a stage; above 1: interleaved (default: 1)")
    p.add_argument("--dp", type=int, default=1, help="data-parallel ranks (default: 1)")
    p.add_argument("--micro-batch", type=int, default=1, help="sequences of a micro-batch (default: 1)")
    p.add_argument("--micro-batches", type=int, default=8, help="of a step, on a data-parallel rank (default: 8)")
    p.add_argument("--json", action="store_true", help="print JSON")


def add_memory(commands: Any) -> None:
    """Add the sub-command ``memory``."""
    p = commands.add_parser(
        "memory",
        help="what a device would hold, and what would fit",
        description="Model the memory of training a named decoder: tensors of a layer, the fullest device by kind, and "
        "with --gpu whether it fits, which layers would have to be recomputed and the longest sequence.",
    )
    _add_training(p)
    p.add_argument("--rule", choices=RULES, default=None, help="bits of stages (default: 4 everywhere)")
    p.add_argument("--gpu", type=gibibytes, default=None, metavar="NAME|GIB", help=f"{', '.join(GPUS)}, or GiB")
    p.add_argument("--reserve", type=float, default=2.0, metavar="GIB", help="kept free on the GPU (default: 2)")
    p.add_argument("--figure", type=Path, default=None, metavar="FILE", help="write a page with a picture there")
    p.set_defaults(run=run_memory)


def add_bits(commands: Any) -> None:
    """Add the sub-command ``bits``."""
    p = commands.add_parser(
        "bits",
        help="bits of pipeline stages under every rule",
        description="Count what stages hold in flight and give the bits of four rules, with what the stages then hold.",
    )
    _add_training(p)
    layouts = [x for x in LAYOUT_NAMES if System(layout=x).encodes]
    p.add_argument("--layout", choices=layouts, default="shared", help="of a layer's activations (default: shared)")
    p.set_defaults(run=run_bits)


def add_paper(commands: Any) -> None:
    """Add the sub-command ``paper``."""
    p = commands.add_parser(
        "paper",
        help="the paper's tables from model configurations",
        description="Regenerate tables 1, 2, 8 and 14 of arXiv 2605.00539 with the error of each number, and list what "
        "in the paper does not fit together.",
    )
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=run_paper)


COMMANDS: tuple[Add, ...] = (add_memory, add_bits, add_paper)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; return the exit status."""
    return run_command(
        "dist_lib.agoq", "Memory of training, with activations and gradients in few bits.", COMMANDS, argv
    )
