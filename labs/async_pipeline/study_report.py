"""What the study of delayed gradients found: tables of its record, and which expected relations hold in it.

The relations were written down before the runs, from an earlier and smaller experiment of the same kind. One that does
not hold is printed as such.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]
NAMES = {
    "adamw": "AdamW",
    "muon": "Muon",
    "nadam": "NAdam",
    "soap": "SOAP",
    "lion": "Lion",
    "adan": "Adan",
    "normuon": "NorMuon",
    "mars": "MARS",
}
LONG, SHORT = 2000, 400
CORRECTED = {
    "ef": "error feedback",
    "extrapolation": "gradient extrapolation",
    "prediction": "weight prediction",
    "dc_asgd": "DC-ASGD",
    "sync_start": "first fifth synchronous",
    "half_lr": "half the learning rate",
    "pipedream4": "PipeDream, 4 stages",
    "pipedream16": "PipeDream, as 16 stages",
}


@dataclass(frozen=True)
class Verdict:
    """One expected relation.

    Attributes:
        name: R1 to R7.
        statement: what was expected.
        found: the numbers, or what is missing.
        holds: None if runs are missing.
    """

    name: str
    statement: str
    found: str
    holds: bool | None


def label(optimizer: str) -> str:
    """An optimizer's name as it is written."""
    return NAMES[optimizer]


class Losses:
    """Final validation losses of a record, by what was varied.

    Args:
        record: with ``runs`` and ``rates``.
    """

    def __init__(self, record: Record) -> None:
        self.rates: Mapping[str, float] = record.get("rates", {})
        self.runs: list[Record] = list(record["runs"].values())

    def by_seed(
        self,
        optimizer: str,
        mode: str,
        steps: int,
        *,
        batch: int = 32,
        lr: float | None = None,
        momentum: float | None = None,
    ) -> dict[int, float]:
        """Loss by seed, infinite if diverged; without ``lr`` the chosen rate, without ``momentum`` the usual one."""
        rate = self.rates.get(optimizer) if lr is None else lr
        wanted = (optimizer, mode, steps, batch, rate, momentum)
        keys = ("optimizer", "mode", "steps", "batch", "lr", "momentum")
        return {
            int(run["seed"]): float("inf") if run["loss"] is None else float(run["loss"])
            for run in self.runs
            if tuple(run[k] for k in keys) == wanted and run["seed"] < 100
        }

    def gaps(self, optimizer: str, mode: str, steps: int, **where: Any) -> list[float]:
        """Loss above the synchronous run of the same seed, for each seed that has both."""
        base = self.by_seed(optimizer, "sync", steps, **where)
        other = self.by_seed(optimizer, mode, steps, **where)
        return [other[seed] - base[seed] for seed in sorted(base) if seed in other]

    def recovered(self, optimizer: str, mode: str, steps: int, **where: Any) -> float | None:
        """Share of the delay's mean gap that a correction takes away; None without both, or without a gap."""
        delay, corrected = self.gaps(optimizer, "delay", steps, **where), self.gaps(optimizer, mode, steps, **where)
        if not delay or not corrected or statistics.fmean(delay) <= 0:
            return None
        return 1.0 - statistics.fmean(corrected) / statistics.fmean(delay)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def _verdict(name: str, statement: str, values: Mapping[str, float | None], holds: Any) -> Verdict:
    missing = [key for key, value in values.items() if value is None]
    if missing:
        return Verdict(name, statement, "not run: " + ", ".join(missing), None)
    return Verdict(name, statement, ", ".join(f"{k} {v:.3f}" for k, v in values.items()), bool(holds(values)))


def verdicts(record: Record) -> list[Verdict]:
    """The expected relations R1 to R7 and whether they hold in a record, for means over the seeds that it has."""
    x = Losses(record)
    gap = {n: _mean(x.gaps(n, "delay", LONG)) for n in ("adamw", "muon")}
    muon_ef, adamw_ef = _mean(x.gaps("muon", "ef", LONG)), x.recovered("adamw", "ef", LONG)
    short = {n: x.recovered(n, "ef", SHORT) for n in ("adamw", "muon")}
    extrapolated = {m: _mean(x.by_seed("adamw", m, LONG).values()) for m in ("ef", "extrapolation")}
    pipe = {m: x.by_seed("muon", m, LONG).get(0) for m in ("delay", "pipedream4", "pipedream16")}
    batch = {
        f"{label(n)} batch {b}": _mean(x.gaps(n, "delay", SHORT, batch=b)[:1])
        for n in ("adamw", "muon")
        for b in (8, 32)
    }
    lr = {f"{r:g}": _mean(x.gaps("adamw", "delay", SHORT, lr=r)[:1]) for r in (1e-3, 2e-3, 4e-3)}
    return [
        _verdict(
            "R1",
            f"at {LONG} steps the gap of AdamW is at least 4 times Muon's, and above 0.08",
            {"AdamW": gap["adamw"], "Muon": gap["muon"]},
            lambda v: v["AdamW"] >= 4 * v["Muon"] and v["AdamW"] > 0.08,
        ),
        _verdict(
            "R2",
            "error feedback recovers at least 70 % of AdamW's gap; Muon's is then within 0.01 of none",
            {"AdamW recovered": adamw_ef, "Muon's gap": muon_ef},
            lambda v: v["AdamW recovered"] >= 0.7 and abs(v["Muon's gap"]) < 0.01,
        ),
        _verdict(
            "R3",
            f"at {SHORT} steps it recovers at least 40 % for AdamW and 55 % for Muon",
            {"AdamW": short["adamw"], "Muon": short["muon"]},
            lambda v: v["AdamW"] >= 0.4 and v["Muon"] >= 0.55,
        ),
        _verdict(
            "R4",
            "AdamW ends lower with error feedback than with extrapolated gradients",
            {"error feedback": extrapolated["ef"], "extrapolation": extrapolated["extrapolation"]},
            lambda v: v["error feedback"] < v["extrapolation"],
        ),
        _verdict(
            "R5",
            "PipeDream's delays are worse than a delay of one, and worse with more stages (Muon)",
            {"one": pipe["delay"], "3, 2, 1, 0": pipe["pipedream4"], "15, 10, 5, 0": pipe["pipedream16"]},
            lambda v: v["one"] < v["3, 2, 1, 0"] < v["15, 10, 5, 0"],
        ),
        _verdict(
            "R6",
            f"at {SHORT} steps a batch of 8 has a smaller gap than one of 32",
            batch,
            lambda v: all(v[f"{n} batch 8"] < v[f"{n} batch 32"] for n in ("AdamW", "Muon")),
        ),
        _verdict(
            "R7",
            f"at {SHORT} steps AdamW's gap grows with the learning rate",
            lr,
            lambda v: v["0.001"] < v["0.002"] < v["0.004"],
        ),
    ]


def _number(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.3f}" if signed else f"{value:.3f}"


def _spread(values: list[float]) -> str:
    """Mean, and of more than one seed the lowest and highest."""
    text = _number(_mean(values), True)
    return text if len(values) < 2 else f"{text} ({min(values):+.3f} to {max(values):+.3f})"


def _grid(rows: list[list[str]]) -> str:
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, wide, strict=True)).rstrip() for row in rows)


def _gap_rows(x: Losses) -> list[list[str]]:
    """A row for each setting that has a synchronous and a delayed run."""
    rows = [["optimizer", "steps", "batch", "lr", "momentum", "seeds", "sync", "delay", "EF", "gap", "with EF", "back"]]
    seen = {(r["optimizer"], r["steps"], r["batch"], r["lr"], r["momentum"]) for r in x.runs if r["seed"] < 100}
    order = list(NAMES)

    def place(key: tuple[Any, ...]) -> tuple[Any, ...]:
        return -key[1], order.index(key[0]), key[2] != 32, key[3], key[4] or 0

    for o, steps, batch, lr, momentum in sorted(seen, key=place):
        where = {"batch": batch, "lr": lr, "momentum": momentum}
        delay, ef = x.gaps(o, "delay", steps, **where), x.gaps(o, "ef", steps, **where)
        if not delay:
            continue
        losses = [_mean(x.by_seed(o, m, steps, **where).values()) for m in ("sync", "delay", "ef")]
        back = x.recovered(o, "ef", steps, **where)
        rows.append(
            [
                label(o),
                str(steps),
                str(batch),
                f"{lr:g}",
                "usual" if momentum is None else f"{momentum:g}",
                str(len(delay)),
                *map(_number, losses),
                _spread(delay),
                _spread(ef),
                "-" if back is None else f"{100 * back:.0f} %",
            ]
        )
    return rows


def _mitigation_rows(x: Losses) -> list[list[str]]:
    rows = [["gap to sync at 2000 steps", "AdamW", "Muon"]]
    for mode, name in {"delay": "delay of one", **CORRECTED}.items():
        gaps = [_mean(x.gaps(o, mode, LONG)) for o in ("adamw", "muon")]
        if any(g is not None for g in gaps):
            rows.append([name, *(_number(g, True) for g in gaps)])
    return rows


def _sweep_rows(record: Record) -> list[list[str]]:
    rows = [["synchronous sweep, seed 100", "lr", "loss", ""]]
    for run in record["runs"].values():
        if run["seed"] >= 100:
            chosen = "chosen" if record.get("rates", {}).get(run["optimizer"]) == run["lr"] else ""
            rows.append(
                [f"{label(run['optimizer'])}, {run['steps']} steps", f"{run['lr']:g}", _number(run["loss"]), chosen]
            )
    return rows


def report(record: Record) -> str:
    """All tables of a record as text."""
    x = Losses(record)
    words = {True: "holds", False: "DOES NOT HOLD", None: "open"}
    lines = [f"{v.name}  {words[v.holds]:<13}  {v.statement}\n    {v.found}" for v in verdicts(record)]
    tables = [_grid(_gap_rows(x)), _grid(_mitigation_rows(x)), "\n".join(lines), _grid(_sweep_rows(record))]
    return "\n\n".join(tables)
