"""Wrong: overwrites the old version whether or not it is in use."""

import torch


class WeightBanks:
    def __init__(self, weights):
        self.banks, self.newest = [weights.clone(), torch.empty_like(weights)], 0

    def acquire(self, version):
        if not max(0, self.newest - 1) <= version <= self.newest:
            raise KeyError(version)
        return self.banks[version % 2]

    def release(self, version):
        pass

    def publish(self, update):
        torch.sub(self.banks[self.newest % 2], update, out=self.banks[(self.newest + 1) % 2])
        self.newest += 1
        return self.newest
