"""Wrong: keeps every version, so the memory grows with the run."""


class WeightBanks:
    def __init__(self, weights):
        self.versions, self.users = [weights.clone()], [0]

    def acquire(self, version):
        if not max(0, len(self.versions) - 2) <= version < len(self.versions):
            raise KeyError(version)
        self.users[version] += 1
        return self.versions[version]

    def release(self, version):
        self.users[version] -= 1

    def publish(self, update):
        if len(self.versions) > 1 and self.users[-2]:
            raise RuntimeError("the old version is in use")
        self.versions.append(self.versions[-1] - update)
        self.users.append(0)
        return len(self.versions) - 1
