"""Settings of the lab."""

from __future__ import annotations

from dataclasses import dataclass

MODELS = ("sums", "smollm2")
CODECS = ("small", "fast", "paper")
STORAGES = ("fp32", "bf16")
OPTIMIZERS = ("adamw", "muon")
OUTER = ("pulse", "diloco", "ddp")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings.

    Attributes:
        model: ``sums``, a small decoder that is trained here to add numbers, or ``smollm2``, the real model, which
            adds one-digit numbers from two examples; the next four settings are of ``sums`` alone.
        d_model: width of the decoder; a multiple of 8.
        n_layers: its layers.
        digits: of each number, 1 to 9.
        warm_steps: supervised steps before reinforcement learning begins.
        steps: GRPO steps, each of which publishes a version.
        prompts: problems of a step.
        samples: answers to each problem.
        lr: learning rate of GRPO.
        storage: ``fp32`` for float32 masters, ``bf16`` for parameters that are rounded after every step.
        optimizer: ``adamw``, or ``muon`` for the hidden matrices.
        codec: of the patches: ``small``, ``fast`` or ``paper``.
        anchor_every: versions between whole copies.
        twin: train once more with full copies instead of patches and compare the weights bit by bit.
        save_every: GRPO steps between saved states; every round of the outer loops is saved.
        rounds: of the outer loops; 0 leaves them out.
        inner_steps: GRPO steps of each worker in a round.
        inner_lr: learning rate of these.
        outer_lr: step size of the outer optimizer.
        outer_momentum: its Nesterov momentum.
        compared: outer loops, of ``pulse``, ``diloco`` and ``ddp``.
    """

    steps: int
    prompts: int
    samples: int
    lr: float
    model: str = "sums"
    d_model: int = 64
    n_layers: int = 2
    digits: int = 2
    warm_steps: int = 250
    storage: str = "fp32"
    optimizer: str = "adamw"
    codec: str = "small"
    anchor_every: int = 10
    twin: bool = True
    save_every: int = 1
    rounds: int = 4
    inner_steps: int = 4
    inner_lr: float = 1e-6
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    compared: tuple[str, ...] = OUTER

    def __post_init__(self) -> None:
        least = {"d_model": 8, "n_layers": 1, "digits": 1, "warm_steps": 0, "steps": 1, "prompts": 1, "samples": 2}
        for name, value in {**least, "anchor_every": 1, "save_every": 1, "rounds": 0, "inner_steps": 1}.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {value}")
        if self.d_model % 8:
            raise ValueError(f"d_model = {self.d_model} must be a multiple of 8")
        for name in ("lr", "inner_lr", "outer_lr"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be above 0")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum = {self.outer_momentum} must be at least 0 and below 1")
        choices = (("model", MODELS), ("codec", CODECS), ("storage", STORAGES), ("optimizer", OPTIMIZERS))
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be one of {', '.join(allowed)}")
        wrong = [n for n in self.compared if n not in OUTER]
        if wrong or len(set(self.compared)) != len(self.compared):
            raise ValueError(f"compared = {self.compared} must be some of {', '.join(OUTER)}, each once")
