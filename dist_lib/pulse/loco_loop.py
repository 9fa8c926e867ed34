"""What all outer loops share, and the two dense ones: DiLoCo and plain data parallelism.

Every worker trains a model of its own for ``inner_steps`` steps of any optimizer; then the workers exchange how far
they came, and all take the same outer step from the same weights. Parameters are seen as one FP32 vector. Inner weights
are FP32 too: rounding them at the start of a round would feed the rounding error back as if it were an update. Buffers
such as running means are each worker's own.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dist_lib.pulse.errors import PulseError, StateError
from dist_lib.pulse.loco_config import (
    FLOAT_BYTES,
    DesyncError,
    NonFiniteError,
    OuterConfig,
    RoundMetrics,
    dense_counted_bytes,
    dense_wire_bytes,
)
from dist_lib.pulse.loco_exchange import Channel, digest_flat

FORMAT = 1


def nesterov_step(theta: Tensor, momentum: Tensor, g: Tensor, *, lr: float, mu: float) -> None:
    """The outer step, in place: M = mu M + g, then theta = theta - lr (g + mu M), as ``torch.optim.SGD`` rounds it.

    Args:
        theta, momentum: 1-D FP32, changed.
        g: mean pseudo-gradient, 1-D FP32, overwritten.
    """
    momentum.mul_(mu).add_(g)
    theta.add_(g.add_(momentum, alpha=mu), alpha=-lr)


def _check_model(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("the model has no parameter to train")
    wrong = [f"{name} ({p.dtype} on {p.device})" for name, p in named.items() if p.dtype != torch.float32]
    if wrong:
        raise ValueError(
            f"inner weights must be float32, but {', '.join(wrong[:5])} of {len(wrong)}: keep FP32 parameters and let "
            f"the forward pass cast them, for example with torch.autocast"
        )
    if len({p.device for p in named.values()}) > 1:
        raise ValueError(f"parameters lie on {sorted({str(p.device) for p in named.values()})}; one device is needed")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held != {id(p) for p in named.values()}:
        missing = [name for name, p in named.items() if id(p) not in held]
        raise ValueError(
            f"the inner optimizer must hold just the trainable parameters of the model; it lacks {missing[:5]} and "
            f"holds {len(held - {id(p) for p in named.values()})} others"
        )
    return named


class OuterLoop(ABC):
    """Base of the outer loops; to be made and stepped by all workers of a group alike.

    Args:
        model: FP32, with the same weights on every worker.
        optimizer: the inner one, over all trainable parameters; its state is this worker's own. One that raises on
            gradients that are not finite ends its worker; one that lets them pass or skips them leaves the decision to
            the round (``nonfinite="propagate"`` or ``"skip"`` of our Muon).
        config: the same on every worker.
        group: default: all ranks; its timeout bounds every wait.

    Raises:
        ValueError: parameters that are not float32, lie on several devices or are not those of the optimizer.
        AgreementError: on all workers, which differ in method, options, names, shapes or weights.
        NonFiniteError: on all workers, weights that are not finite.
        PulseError: there is no process group.

    Attributes:
        method: ``"pulse"``, ``"diloco"`` or ``"ddp"``.
        theta: the weights that all workers agree on, 1-D float32, in order of ``model.named_parameters()``.
        momentum: of the outer optimizer, the same on all workers, 1-D float32.
        rounds, inner_step: completed rounds, and inner steps since.
        metrics: of the last round, or None.
    """

    method: ClassVar[str]
    _private: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: OuterConfig | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model, self.optimizer, self.config = model, optimizer, config or OuterConfig()
        self._named = _check_model(model, optimizer)
        self.channel = Channel(group)
        self.rounds, self.inner_step, self._broken = 0, 0, False
        self.metrics: RoundMetrics | None = None
        self.theta = self._weights()
        self.momentum = torch.zeros_like(self.theta)
        self.channel.agree([self.method, asdict(self.config), self._layout()], "the method, options and parameters")
        self.channel.agree(digest_flat([self.theta]), "the first weights")
        if not bool(torch.isfinite(self.theta).all()):
            raise NonFiniteError("the first weights are not finite")

    @property
    def steps_done(self) -> int:
        """Inner steps of this worker since the start, which is the index of the next batch."""
        return self.rounds * self.config.inner_steps + self.inner_step

    @property
    def cells(self) -> int:
        """Number of parameters."""
        return self.theta.numel()

    def consensus(self) -> dict[str, Tensor]:
        """The agreed weights by name, views of ``theta``: what to publish. Within a round the model's own differ."""
        parts = self.theta.split([p.numel() for p in self._named.values()])
        return {name: part.view(p.shape) for (name, p), part in zip(self._named.items(), parts, strict=True)}

    def step(self, closure: Callable[[], Any] | None = None) -> RoundMetrics | None:
        """One inner step; the last of a round exchanges updates with the other workers and takes the outer step.

        Args:
            closure: as for the inner optimizer.

        Returns:
            Metrics if a round was completed, else None.

        Raises:
            WorkerLostError: a worker died or hangs; this loop is over.
            DesyncError: the workers do different things.
            AgreementError: the workers hold different bits after the round.
            NonFiniteError: no worker has finite values, or the outer step left the range of FP32.
        """
        self._check_usable()
        self.optimizer.step(closure)  # type: ignore[arg-type]
        self.inner_step += 1
        if self.inner_step < self.config.inner_steps:
            return None
        with self.in_step(), torch.no_grad():
            self.metrics = self._close_round()
        return self.metrics

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Around anything collective: after an error inside, this loop refuses to go on."""
        self._check_usable()
        try:
            yield
        except BaseException:
            self._broken = True
            raise

    def _check_usable(self) -> None:
        if self._broken:
            raise PulseError(
                "this loop stopped in the middle of a round and may differ from those of the other workers; start all "
                "of them again and resume() from the last complete checkpoint"
            )

    def _layout(self) -> list[list[Any]]:
        return [[name, *p.shape] for name, p in self._named.items()]

    def _weights(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self._named.values()])

    @torch.no_grad()
    def _write(self, flat: Tensor) -> None:
        parts = flat.split([p.numel() for p in self._named.values()])
        for p, part in zip(self._named.values(), parts, strict=True):
            p.copy_(part.view(p.shape))

    @abstractmethod
    def _close_round(self) -> RoundMetrics:
        """Exchange, step and prove; ``theta``, model and counters are those of the next round afterwards."""

    def _contributors(self, size: int) -> tuple[list[int], tuple[int, ...]]:
        """Announce this worker's payload (-1: not finite): the sizes of all, and the ranks that are dropped."""
        sizes = self.channel.announce("round", self.rounds, self.inner_step, size)
        dropped = tuple(rank for rank, size in enumerate(sizes) if size < 0)
        if len(dropped) == len(sizes):
            raise NonFiniteError(f"round {self.rounds + 1}: no worker has finite values; start from a checkpoint")
        return sizes, dropped

    def _forget_inner(self) -> None:
        """Empty the inner optimizer's state, which may hold what made this worker's values not finite."""
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": {}})

    def _outer_step(self, g: Tensor) -> None:
        g /= self.channel.workers
        nesterov_step(self.theta, self.momentum, g, lr=self.config.outer_lr, mu=self.config.outer_momentum)
        self._write(self.theta)

    def _finish(self) -> str:
        """Count the round and prove that all workers hold the same bits."""
        if not bool(torch.isfinite(self.theta).all()):
            raise NonFiniteError(f"round {self.rounds + 1}: the new weights are not finite; start from a checkpoint")
        self.rounds, self.inner_step = self.rounds + 1, 0
        if self.rounds % self.config.digest_every:
            return ""
        digest = self.digest()
        self.channel.agree(digest, f"parameters and momentum after round {self.rounds}")
        return digest

    def digest(self) -> str:
        """SHA-256 of consensus and outer momentum in hexadecimal."""
        return digest_flat([self.theta, self.momentum])

    def state_dict(self) -> dict[str, Any]:
        """This worker's state, mid-round too; tensors are shared with the loop, as with torch's optimizers.

        It holds plain types and tensors only (``torch.load(..., weights_only=True)`` reads it).

        Raises:
            PulseError: the loop stopped in the middle of a round.
        """
        self._check_usable()
        return {
            "format": FORMAT,
            "method": self.method,
            "layout": self._layout(),
            "rank": self.channel.rank,
            "workers": self.channel.workers,
            "rounds": self.rounds,
            "inner_step": self.inner_step,
            "theta": self.theta,
            "momentum": self.momentum,
            "weights": self._weights() if self.inner_step else None,
            "optimizer": self.optimizer.state_dict(),
            **{name: getattr(self, name) for name in self._private},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` of this worker returned; collective.

        Raises:
            StateError: on a worker whose state does not fit; the others raise DesyncError.
            AgreementError: on all workers, states of different rounds or of different bits.
        """
        self._load(state, own=True)

    def load_consensus(self, state: dict[str, Any]) -> None:
        """Join late with the state of any other worker: its consensus and momentum, nothing private; collective.

        The others call :meth:`load_state_dict` meanwhile. Error-feedback buffer and inner optimizer start empty.

        Raises:
            StateError, AgreementError: as for :meth:`load_state_dict`; also a state from the middle of a round.
        """
        self._load(state, own=False)

    def _load(self, state: dict[str, Any], *, own: bool) -> None:
        with self.in_step():
            problem = self._misfit(state, own)
            failed = self.channel.announce("load", 0, 0, -1 if problem else 0)
            if problem:
                raise StateError(problem)
            if -1 in failed:
                bad = [rank for rank, number in enumerate(failed) if number < 0]
                raise DesyncError(f"ranks {bad} refused their states; nothing was loaded here")
            self._take(state, own)
            where = [self.rounds, self.inner_step, self.digest()]
            self.channel.agree(where, "round, inner step, parameters and momentum of the loaded states")

    def _misfit(self, state: dict[str, Any], own: bool) -> str:
        expected = {"format": FORMAT, "method": self.method, "layout": self._layout()}
        for key, value in expected.items():
            if state.get(key) != value:
                return f"the state's {key} is {str(state.get(key))[:200]}; this loop needs {str(value)[:200]}"
        step = state.get("inner_step")
        if not isinstance(step, int) or not 0 <= step < self.config.inner_steps or not isinstance(state["rounds"], int):
            return f"the state is of inner step {step}; this loop has {self.config.inner_steps} a round"
        if own and step and state.get("workers") != self.channel.workers:
            return (
                f"the state is of inner step {step} of {state.get('workers')} workers; there are {self.channel.workers}"
            )
        if not own and step:
            return f"the state is of inner step {step}: a worker can join at the beginning of a round only"
        names = ["theta", "momentum", *(self._private if own else ()), *(["weights"] if step else [])]
        for name in names:
            tensor = state.get(name)
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32 or tensor.shape != self.theta.shape:
                return f"the state's {name} is not a float32 vector of {self.cells} parameters"
        return ""

    @torch.no_grad()
    def _take(self, state: dict[str, Any], own: bool) -> None:
        self.theta.copy_(state["theta"])
        self.momentum.copy_(state["momentum"])
        for name in self._private:
            buffer: Tensor = getattr(self, name)
            buffer.zero_()
            if own:
                buffer += state[name].to(buffer.device)
        self.rounds, self.inner_step = state["rounds"], state["inner_step"]
        self._write(state["weights"].to(self.theta.device) if self.inner_step else self.theta)
        if own:
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            self._forget_inner()

    def _dense_metrics(self, dropped: tuple[int, ...], digest: str) -> RoundMetrics:
        cells, workers, mine = self.cells, self.channel.workers, self.channel.rank not in dropped
        return RoundMetrics(
            round=self.rounds,
            workers=workers,
            dropped=dropped,
            cells=cells,
            sent_cells=cells * mine,
            union_cells=cells,
            payload_bytes=FLOAT_BYTES * cells * mine,
            counted_bytes=dense_counted_bytes(cells, workers, digest=bool(digest)),
            wire_bytes=dense_wire_bytes(cells, workers, digest=bool(digest)),
            error_norm=0.0,
            digest=digest,
        )


class DenseDiLoCo(OuterLoop):
    """DiLoCo: the outer step of :class:`~dist_lib.pulse.PulseLoCo` from whole pseudo-gradients, without a gate.

    Arguments, attributes and errors are those of :class:`~dist_lib.pulse.loco_loop.OuterLoop`. A worker whose
    pseudo-gradient is not finite contributes nothing; its weights return to the consensus.
    """

    method = "diloco"

    def _close_round(self) -> RoundMetrics:
        s = self.theta - self._weights()
        finite = bool(torch.isfinite(s).all())
        _, dropped = self._contributors(FLOAT_BYTES * self.cells if finite else -1)
        if not finite:
            self._forget_inner()
            s.zero_()
        self._outer_step(self.channel.dense_sum(s))
        return self._dense_metrics(dropped, self._finish())


class DataParallel(OuterLoop):
    """Synchronous data parallelism in the same harness: gradients are averaged in rank order at every step.

    Every step is a round, ``inner_steps`` must be 1, and the options of the outer optimizer have no effect. A parameter
    without a gradient counts as one of zeros. A worker whose gradient is not finite contributes nothing.
    """

    method = "ddp"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: OuterConfig | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        config = config or OuterConfig(inner_steps=1)
        if config.inner_steps != 1:
            raise ValueError(
                f"inner_steps is {config.inner_steps}; data parallelism needs 1: it averages at every step"
            )
        super().__init__(model, optimizer, config, group)

    def step(self, closure: Callable[[], Any] | None = None) -> RoundMetrics:
        """Average gradients and take the same inner step on every worker; see the base class for errors."""
        self._check_usable()
        if closure is not None:
            with torch.enable_grad():
                closure()
        with self.in_step(), torch.no_grad():
            self.metrics = self._close_round()
        return self.metrics

    def _close_round(self) -> RoundMetrics:
        zero = [p.grad.reshape(-1) if p.grad is not None else p.new_zeros(p.numel()) for p in self._named.values()]
        flat = torch.cat(zero)
        finite = bool(torch.isfinite(flat).all())
        _, dropped = self._contributors(FLOAT_BYTES * self.cells if finite else -1)
        mean = self.channel.dense_sum(flat if finite else flat.zero_()).div_(self.channel.workers)
        parts = mean.split([p.numel() for p in self._named.values()])
        for p, part in zip(self._named.values(), parts, strict=True):
            p.grad = part.view(p.shape)
        self.optimizer.step()
        self.theta = self._weights()
        return self._dense_metrics(dropped, self._finish())
