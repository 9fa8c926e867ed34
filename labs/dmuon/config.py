"""Settings of the lab."""

from __future__ import annotations

from dataclasses import dataclass

NAMES = ("dmuon", "replicated", "gather", "all-to-all", "adamw")
MODES = ("ddp", "fsdp-keep", "fsdp-free", "hsdp-keep", "hsdp-free")
METHODS = ("lpt", "milp", "round_robin", "rank0")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings.

    Attributes:
        model: name of a decoder configuration.
        steps: of each training.
        batch_size: sequences in the global batch; a multiple of the ranks.
        seq_len: tokens in a sequence.
        lr: peak learning rate of Muon and of AdamW beside it.
        adamw_lr: of AdamW for everything.
        compared: other methods that are trained, of ``replicated``, ``gather``, ``all-to-all`` and ``adamw``.
        mode: of the owners: ``ddp``, or FSDP2 with weights kept (``fsdp-keep``) or freed (``fsdp-free``) after forward,
            or the same in groups of ``shards`` ranks of which each holds a replica (``hsdp-keep``, ``hsdp-free``).
        shards: ranks of a replica in the two ``hsdp`` modes, where they must divide the ranks; else without effect.
        publish: ``sync``, or ``async``, when each layer waits for its new weights just before it runs.
        owners: how they are chosen: ``lpt``, ``milp``, ``round_robin`` or ``rank0``.
        packs: what travels in one message: an owner's matrices of one ``layer``, which overlaps with computing, or of
            the whole ``model``, which takes fewer messages; ``model`` is for mode ``ddp``.
        ordered: add gradients in rank order, so that any number of ranks has the bits of a single process.
        weight_decay: of every optimizer.
        warmup: steps of linear warm-up; then half a cosine to a tenth of the peak.
        twin: train once more in a single process and compare the weights bit by bit.
        save_every: steps of the owners' training between saved states; 0 saves only between trainings.
    """

    model: str
    steps: int
    batch_size: int
    seq_len: int
    lr: float
    adamw_lr: float
    compared: tuple[str, ...] = ("replicated", "gather", "adamw")
    mode: str = "ddp"
    shards: int = 2
    publish: str = "async"
    owners: str = "lpt"
    packs: str = "layer"
    ordered: bool = True
    weight_decay: float = 0.1
    warmup: int = 10
    twin: bool = True
    save_every: int = 50

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len", "shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("lr", "adamw_lr"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be above 0")
        if min(self.weight_decay, self.warmup, self.save_every) < 0:
            raise ValueError("weight_decay, warmup and save_every must be at least 0")
        for name, allowed in (
            ("mode", MODES),
            ("publish", ("sync", "async")),
            ("packs", ("layer", "model")),
            ("owners", METHODS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be one of {', '.join(allowed)}")
        wrong = [n for n in self.compared if n not in NAMES[1:]]
        if wrong or len(set(self.compared)) != len(self.compared):
            raise ValueError(f"compared = {self.compared} must be some of {', '.join(NAMES[1:])}, each once")
        if self.packs == "model" and self.mode != "ddp":
            raise ValueError("packs = 'model' needs mode = 'ddp': FSDP2 fetches weights layer by layer")
        if self.ordered and self.mode != "ddp":
            raise ValueError("ordered = true needs mode = 'ddp': FSDP2 adds gradients in the backend's order")
