"""Wrong: hands out whatever lies in the bank, also for a version that does not exist."""

import torch


class WeightBanks:
    def __init__(self, weights):
        self.banks, self.users, self.newest = [weights.clone(), torch.empty_like(weights)], [0, 0], 0

    def acquire(self, version):
        self.users[version % 2] += 1
        return self.banks[version % 2]

    def release(self, version):
        self.users[version % 2] -= 1

    def publish(self, update):
        if self.users[(self.newest + 1) % 2]:
            raise RuntimeError("in use")
        torch.sub(self.banks[self.newest % 2], update, out=self.banks[(self.newest + 1) % 2])
        self.newest += 1
        return self.newest
