"""What the small language-model study of delayed gradients runs: one :class:`Run` a training, in order of importance.

The list is fixed before anything is measured, except for the learning rates: those are the best synchronous ones of a
sweep on seeds that the study does not use. Delayed runs take them over unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import AdamW, NAdam, Optimizer

from dist_lib.optim import MuonWithAdamW, ParameterSplit

Named = list[tuple[str, nn.Parameter]]
MODES = (
    "sync",
    "delay",
    "ef",
    "extrapolation",
    "prediction",
    "dc_asgd",
    "sync_start",
    "half_lr",
    "pipedream4",
    "pipedream16",
)
SWEEP_SEED, SWEEP_STEPS = 100, 1000
SWEEP_RATES: Mapping[str, tuple[float, ...]] = {
    "adamw": (2e-3, 4e-3, 8e-3),
    "muon": (2.5e-3, 5e-3, 1e-2, 2e-2),
    "nadam": (2e-3, 4e-3, 8e-3),
    "lion": (4e-4, 8e-4, 1.6e-3, 3.2e-3),
    "adan": (8e-3, 1.6e-2, 3.2e-2),
    "soap": (2e-3, 4e-3, 8e-3, 1.6e-2),
    "mars": (2e-3, 4e-3, 8e-3),
    "normuon": (2.5e-3, 5e-3, 1e-2),
}
DECAY = 0.1
TABLE_RATE = 4e-3  # AdamW's in Muon and NorMuon (embedding, head, norms)
PACKAGE_OPTIMIZERS = ("lion", "adan", "soap", "mars", "normuon")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training.

    Attributes:
        optimizer: a key of ``SWEEP_RATES``.
        lr: peak learning rate: of all parameters, or of the matrices with Muon and NorMuon, whose AdamW part has
            ``TABLE_RATE``.
        steps: optimizer updates.
        mode: one of ``MODES``.
        seed: of the initial weights and of the batches.
        batch: sequences a step.
        momentum: first momentum coefficient; None keeps the optimizer's usual one.
    """

    optimizer: str
    lr: float
    steps: int
    mode: str
    seed: int
    batch: int = 32
    momentum: float | None = None

    @property
    def key(self) -> str:
        """Name of the run, unique among different runs."""
        parts = [self.optimizer, f"lr{self.lr:g}", f"steps{self.steps}", f"batch{self.batch}"]
        parts += [f"momentum{self.momentum:g}"] if self.momentum is not None else []
        return "/".join([*parts, self.mode, f"seed{self.seed}"])


def is_matrix(name: str, p: nn.Parameter) -> bool:
    """Whether Muon takes a decoder's parameter: matrices of the layers, not the embedding and the head."""
    return p.ndim == 2 and not name.startswith(("embed_tokens", "lm_head"))


def _groups(named: Named) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without; no empty group."""
    wide, narrow = [p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim < 2]
    groups = [{"params": wide, "weight_decay": DECAY}, {"params": narrow, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _muon(named: Named, lr: float, table_lr: float, momentum: float) -> Optimizer:
    matrices = [(n, p) for n, p in named if is_matrix(n, p)]
    rest = [(n, p) for n, p in named if not is_matrix(n, p)]
    if not matrices:
        return AdamW(_groups(rest), table_lr, betas=(0.9, 0.95))
    tables, norms = [(n, p) for n, p in rest if p.ndim > 1], [(n, p) for n, p in rest if p.ndim < 2]
    optimizer = MuonWithAdamW(
        ParameterSplit(muon=matrices, adamw=norms),
        lr,
        adamw_lr=table_lr,
        weight_decay=DECAY,
        momentum=momentum,
        ns_coefficients="keller",
        nonfinite="propagate",  # a run that diverges is a result
    )
    if optimizer.adamw is not None:
        optimizer.adamw.param_groups[0]["weight_decay"] = 0.0  # norms
        if tables:
            optimizer.add_param_group({"params": tables, "name": "adamw", "weight_decay": DECAY})
    return optimizer


def _normuon(named: Named, lr: float, table_lr: float) -> Optimizer:
    from pytorch_optimizer import NorMuon

    matrices = [p for n, p in named if is_matrix(n, p)]
    groups: list[dict[str, Any]] = [{"params": matrices, "use_muon": True, "lr": lr, "weight_decay": DECAY}]
    for group in _groups([(n, p) for n, p in named if not is_matrix(n, p)]):
        groups.append({**group, "use_muon": False, "lr": table_lr, "betas": (0.9, 0.95), "eps": 1e-8})
    return NorMuon(groups, update_scale="match_rms")


def make_optimizer(run: Run, named: Named) -> Optimizer:
    """The optimizer of a run, with decoupled weight decay on matrices.

    Raises:
        ValueError: an unknown optimizer, or a momentum for one that the study does not vary it for.
    """
    name, factor = run.optimizer, 0.5 if run.mode == "half_lr" else 1.0
    lr, table_lr = run.lr * factor, TABLE_RATE * factor
    if name == "adamw":
        return AdamW(_groups(named), lr, betas=(0.9 if run.momentum is None else run.momentum, 0.95))
    if name == "muon":
        return _muon(named, lr, table_lr, 0.95 if run.momentum is None else run.momentum)
    if run.momentum is not None:
        raise ValueError(f"momentum is varied for adamw and muon only, not for {name!r}")
    if name == "nadam":
        return NAdam(_groups(named), lr, betas=(0.9, 0.95), decoupled_weight_decay=True)
    if name == "normuon":
        return _normuon(named, lr, table_lr)
    if name not in PACKAGE_OPTIMIZERS:
        raise ValueError(f"optimizer {name!r}; there are {', '.join(SWEEP_RATES)}")
    import pytorch_optimizer as package

    groups = _groups(named)
    if name == "lion":
        return package.Lion(groups, lr, betas=(0.9, 0.95))
    if name == "adan":
        return package.Adan(groups, lr, betas=(0.98, 0.92, 0.99), weight_decouple=True)
    if name == "soap":
        return package.SOAP(groups, lr, betas=(0.95, 0.95))
    return package.MARS(groups, lr, lr_1d=lr, weight_decay_1d=0.0)


def sweep_runs(names: Iterable[str] = SWEEP_RATES, *, steps: int = SWEEP_STEPS) -> list[Run]:
    """Synchronous runs from which the learning rates are chosen."""
    return [
        Run(optimizer=name, lr=lr, steps=steps, mode="sync", seed=SWEEP_SEED)
        for name in names
        for lr in SWEEP_RATES[name]
    ]


def best_rates(losses: Mapping[str, float | None], *, steps: int = SWEEP_STEPS) -> dict[str, float]:
    """The swept learning rate of lowest loss for each optimizer whose sweep is complete.

    Args:
        losses: validation loss by run key; None for a run that diverged.
        steps: length of the sweep's runs.
    """
    best: dict[str, float] = {}
    for name in SWEEP_RATES:
        runs = sweep_runs([name], steps=steps)
        if all(run.key in losses for run in runs):
            found = [(loss, run.lr) for run in runs if (loss := losses[run.key]) is not None]
            if found:
                best[name] = min(found)[1]
    return best


def _cross(base: Run, modes: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    return [replace(base, mode=mode, seed=seed) for seed in seeds for mode in modes]


def plan(rates: Mapping[str, float], *, steps: int = 2000, short: int = 400) -> dict[str, list[Run]]:
    """Groups of runs in order of importance; a group needs the rates of its optimizers.

    Args:
        rates: peak learning rate by optimizer, as chosen by the sweep.
        steps: updates of a long run.
        short: updates of a short run.
    """
    three = ("sync", "delay", "ef")
    pair = [n for n in ("adamw", "muon") if n in rates]
    full = {n: Run(optimizer=n, lr=rates[n], steps=steps, mode="sync", seed=0) for n in rates}
    brief = {n: replace(run, steps=short) for n, run in full.items()}
    others = [n for n in ("nadam", "soap", "lion", "adan", "normuon", "mars") if n in rates]
    groups: dict[str, list[Run]] = {
        "main": [r for n in pair for r in _cross(full[n], three, [0])],
        "short": [r for n in pair for r in _cross(brief[n], three, [0, 1, 2])],
        "lr": [],
        "batch": [r for n in pair for r in _cross(replace(brief[n], batch=8), three, [0])],
        "extrapolation": [r for n in pair for r in _cross(full[n], ["extrapolation"], [0])],
        "pipedream": _cross(full["muon"], ["pipedream4", "pipedream16"], [0]) if "muon" in rates else [],
        "seed1": [r for n in pair for r in _cross(full[n], (*three, "extrapolation"), [1])],
        "momentum": [],
        "others": [r for n in others for r in _cross(full[n], three, [0])],
        "mitigations": [
            r for n in pair for r in _cross(full[n], ["prediction", "dc_asgd", "sync_start", "half_lr"], [0])
        ],
        "momentum-long": [],
    }
    if "adamw" in rates:
        for lr in (1e-3, 2e-3, 4e-3):
            groups["lr"] += _cross(replace(brief["adamw"], lr=lr), three, [0])
        for beta in (0.5, 0.8, 0.95, 0.98):  # 0.9 is the usual one
            groups["momentum"] += _cross(replace(brief["adamw"], momentum=beta), three, [0])
    if "muon" in rates:
        for beta in (0.8, 0.9, 0.98):  # 0.95 is the usual one
            groups["momentum"] += _cross(replace(brief["muon"], momentum=beta), three, [0])
    for n in pair:
        for beta in (0.8, 0.95) if n == "adamw" else (0.8,):
            groups["momentum-long"] += _cross(replace(full[n], momentum=beta), three, [0])
    return groups
