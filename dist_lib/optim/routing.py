"""Which parameters Muon takes and which AdamW takes, by rule, with the reason for each.

The rules look at what a parameter is (its module, its shape, what it is tied to) and at names only where nothing else
can tell: an output head is a linear layer like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn
from torch.nn import Parameter

HEAD_NAMES = frozenset({"lm_head", "head", "output", "output_head", "classifier", "score", "unembed"})
Rule = Callable[[str, Parameter], str | None]


@dataclass(frozen=True)
class ParameterSplit:
    """The parameters of a model, each once.

    Attributes:
        muon: (name, parameter) pairs for Muon, in the model's order.
        adamw: the others that are trained.
        frozen: names of parameters that need no gradient; no optimizer takes them.
        reasons: for each name, why it is where it is.
    """

    muon: list[tuple[str, Parameter]] = field(default_factory=list)
    adamw: list[tuple[str, Parameter]] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def explain(self) -> str:
        """One line a parameter: optimizer, name, shape, reason."""
        rows = [("muon", n, str(tuple(p.shape))) for n, p in self.muon]
        rows += [("adamw", n, str(tuple(p.shape))) for n, p in self.adamw]
        rows += [("none", n, "") for n in self.frozen]
        wide = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        return "\n".join(
            f"{a:<{wide[0]}}  {n:<{wide[1]}}  {s:<{wide[2]}}  {self.reasons[n]}".rstrip() for a, n, s in rows
        )


def _embeddings(model: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    return [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]


def _adamw_reason(name: str, p: Parameter, owners: list[nn.Module], aliases: list[str], model: nn.Module) -> str:
    """Why AdamW takes it; an empty string if Muon does."""
    tables = _embeddings(model)
    if any(p is table.weight for table in tables):
        return "embedding" + (f", tied with {', '.join(aliases)}" if aliases else "")
    if p.ndim < 2:
        return "vector or scalar (norm, bias)"
    parts = [part for full in (name, *aliases) for part in full.split(".")]
    if any("embed" in part and "unembed" not in part for part in parts):
        return "embedding by its name"
    if any(part in HEAD_NAMES for full in (name, *aliases) for part in full.split(".")[-2:]):
        return "output head by its name"
    repeated = any(part.isdigit() for part in name.split("."))  # one of a list of layers; an MLP may have any shape
    if not repeated and any(p.shape == table.weight.shape for table in tables) and isinstance(owners[0], nn.Linear):
        return "output head: a linear layer with the shape of an embedding"
    if any(isinstance(m, nn.modules.conv._ConvNd) for m in owners):
        return "convolution kernel (Muon takes it with flatten=True)"
    if p.ndim > 3:
        return f"{p.ndim} dimensions (Muon takes it with flatten=True)"
    if min(p.shape[-2:]) <= 1:
        return "a single row or column: orthogonalising only normalises it"
    return ""


def split_parameters(model: nn.Module, *, rule: Rule | None = None) -> ParameterSplit:
    """Sort the parameters of a model: hidden matrices (and stacks of them) to Muon, the rest to AdamW.

    AdamW takes embeddings and what is tied to them, the output head, everything with fewer than two dimensions,
    convolution kernels, and matrices of one row or column. A parameter that is used under two names counts once.

    Args:
        model: on any device, also meta.
        rule: called with name and parameter first; returns ``"muon"``, ``"adamw"`` or ``None`` to leave the choice to
            the rules above.

    Raises:
        ValueError: ``rule`` returned something else, or gave Muon a vector.
    """
    split = ParameterSplit()
    names: dict[int, list[str]] = {}
    owners: dict[int, list[nn.Module]] = {}
    for prefix, module in model.named_modules():
        for local, p in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(id(p), []).append(f"{prefix}.{local}" if prefix else local)
            owners.setdefault(id(p), []).append(module)
    for name, p in model.named_parameters():
        aliases = [n for n in names[id(p)] if n != name]
        if not p.requires_grad:
            split.frozen.append(name)
            split.reasons[name] = "frozen: requires_grad is False"
            continue
        wish = rule(name, p) if rule is not None else None
        if wish not in ("muon", "adamw", None) or (wish == "muon" and p.ndim < 2):
            raise ValueError(
                f"the rule returned {wish!r} for {name} of shape {tuple(p.shape)}; it may return 'muon' (only for at "
                f"least 2 dimensions), 'adamw' or None"
            )
        reason = "" if wish == "muon" else _adamw_reason(name, p, owners[id(p)], aliases, model)
        to_muon = wish == "muon" or (wish is None and not reason)
        (split.muon if to_muon else split.adamw).append((name, p))
        default = f"stack of {p.shape[0]} matrices" if p.ndim == 3 else "hidden matrix"
        split.reasons[name] = "by the caller's rule" if wish else reason or default
    return split
