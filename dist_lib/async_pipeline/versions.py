"""The weights of one stage at the versions that are still needed: two under a delay of one, one without delay.

Version v lives in bank ``v % copies``. A forward reads a bank through ``torch.func.functional_call``, so that its graph
belongs to that version; the update goes out of place into the bank that nobody needs any more. The module's own
parameters are what the optimizer knows; they always show the newest version and share its memory. No schedule here,
and no communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call


class VersionError(RuntimeError):
    """Weights of a version that does not exist (any more, or yet), or that live graphs still need."""


class WeightVersions:
    """The banks of one stage.

    Args:
        module: the stage; its present weights become version 0, in all banks.
        copies: versions to keep, at least 1.

    Attributes:
        module: the stage.
        names: parameter names, shared parameters once, in the order of ``module.named_parameters()``.
        newest: number of the newest version, which is the number of updates made.
    """

    def __init__(self, module: nn.Module, copies: int) -> None:
        if copies < 1:
            raise ValueError(f"copies is {copies}; at least one version of the weights is needed")
        self.module, self.copies, self.newest = module, copies, 0
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.names = tuple(self._parameters)
        self._banks: list[dict[str, Tensor]] = []
        for bank in range(copies):
            # .data: memory of the parameter with a version counter of its own, which other banks do not move
            weights = {n: p.data if bank == 0 else p.data.clone() for n, p in self._parameters.items()}
            self._banks.append({n: w.requires_grad_() for n, w in weights.items()})
        self._graphs: Counter[int] = Counter()

    @property
    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer works on: the module's own parameters, which show the newest version."""
        return list(self._parameters.items())

    def at(self, version: int) -> dict[str, Tensor]:
        """The leaf tensors of one version, by name.

        Raises:
            VersionError: a version that is not kept. Before the first updates the initial weights, version 0, are
                the only one.
        """
        if not max(0, self.newest - self.copies + 1) <= version <= self.newest:
            raise VersionError(
                f"version {version} of the weights is not kept: the newest is {self.newest}, of {self.copies} in memory"
            )
        return self._banks[version % self.copies]

    def forward(self, version: int, x: Tensor) -> Tensor:
        """Run the module on ``x`` with one version; the graph stays alive until :meth:`release`."""
        output: Tensor = functional_call(self.module, self.at(version), (x,))
        self._graphs[version] += 1
        return output

    def release(self, version: int) -> list[Tensor | None]:
        """Take out the gradients that one backward left on a version; its graph is done.

        Returns:
            One gradient for each name, None where the loss does not depend on it.
        """
        leaves = self.at(version)
        taken = [leaf.grad for leaf in leaves.values()]
        for leaf in leaves.values():
            leaf.grad = None
        self._graphs[version] -= 1
        return taken

    def live(self) -> tuple[int, ...]:
        """Versions that graphs still need, ascending."""
        return tuple(sorted(v for v, count in self._graphs.items() if count > 0))

    @torch.no_grad()
    def advance(self, gradients: Sequence[Tensor | None], step: Callable[[], object]) -> None:
        """Make the next version: copy the newest into the retired bank, then let ``step`` update it there in place.

        Args:
            gradients: one for each name; given to the parameters for the time of ``step``.
            step: the optimizer's.

        Raises:
            VersionError: a live graph needs the weights that would be overwritten.
        """
        retired = self.newest + 1 - self.copies
        if self._graphs[retired] > 0:
            raise VersionError(
                f"version {retired} cannot be overwritten: {self._graphs[retired]} micro-batches still need it"
            )
        source, target = self._banks[self.newest % self.copies], self._banks[(self.newest + 1) % self.copies]
        for (name, parameter), gradient in zip(self._parameters.items(), gradients, strict=True):
            if self.copies > 1:
                target[name].copy_(source[name])
            torch.autograd.graph.increment_version(target[name])  # .data hides the update: a stale graph must notice
            parameter.data = target[name].data
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        with torch.enable_grad():
            step()
        for parameter in self._parameters.values():
            parameter.grad = None
        self.newest += 1
        self._graphs = +self._graphs

    def state_dict(self) -> dict[str, object]:
        """Copies of all versions kept, newest first, and the newest's number.

        Raises:
            VersionError: live graphs: finish the micro-batches in flight first.
        """
        if self.live():
            raise VersionError(f"micro-batches in flight still need versions {self.live()}: finish them first")
        kept = range(self.newest, self.newest - self.copies, -1)
        weights = [{n: w.detach().clone() for n, w in self._banks[v % self.copies].items()} for v in kept]
        return {"newest": self.newest, "weights": weights}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what :meth:`state_dict` gave.

        Raises:
            ValueError: another number of copies, other names or shapes, or an impossible version; nothing has changed.
        """
        newest, weights = state["newest"], state["weights"]
        if not isinstance(newest, int) or newest < 0 or not isinstance(weights, list) or len(weights) != self.copies:
            raise ValueError(
                f"the saved weights are not {self.copies} versions with a number: they belong to another delay"
            )
        for saved in weights:
            here = {n: (w.shape, w.dtype) for n, w in self._banks[0].items()}
            there = {n: (w.shape, w.dtype) for n, w in saved.items()}
            if here != there:
                wrong = sorted(n for n in here.keys() | there.keys() if here.get(n) != there.get(n))
                raise ValueError(f"saved weights that do not fit this stage (name, shape or dtype): {', '.join(wrong)}")
        if self.live():
            raise ValueError(f"micro-batches in flight still need versions {self.live()}: finish them first")
        self.newest = newest
        for back, saved in enumerate(weights):
            bank = self._banks[(newest - back) % self.copies]
            for name, tensor in saved.items():
                bank[name].copy_(tensor)
        for name, parameter in self._parameters.items():
            parameter.data = self._banks[newest % self.copies][name].data
