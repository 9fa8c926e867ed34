"""Reference solution."""

import torch
from torch import Tensor


class WeightBanks:
    def __init__(self, weights: Tensor) -> None:
        self.banks = [weights.clone(), torch.empty_like(weights)]
        self.users = [0, 0]
        self.newest = 0

    def _bank(self, version: int) -> int:
        if not max(0, self.newest - 1) <= version <= self.newest:
            raise KeyError(f"version {version} is not alive; the newest is {self.newest}")
        return version % 2

    def acquire(self, version: int) -> Tensor:
        bank = self._bank(version)
        self.users[bank] += 1
        return self.banks[bank]

    def release(self, version: int) -> None:
        self.users[self._bank(version)] -= 1

    def publish(self, update: Tensor) -> int:
        source, target = self.newest % 2, (self.newest + 1) % 2
        if self.users[target]:
            raise RuntimeError(f"version {self.newest - 1} still has {self.users[target]} users")
        torch.sub(self.banks[source], update, out=self.banks[target])
        self.newest += 1
        return self.newest
