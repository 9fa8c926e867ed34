"""Wrong: every rank orthogonalises its own rows."""


def sharded_update(shards, orthogonalise):
    return [orthogonalise(s) * 0.2 * max(s.shape) ** 0.5 if len(s) else s for s in shards]
