"""Factories of the test of the self-check."""

import itertools

from tests.distributed.ranks_of_dmuon import Net, batch

calls = itertools.count()


def build():
    return Net(seed=1)


def unsupported():
    model = Net(seed=1)
    model.embed.sparse = True
    return model


def loss(model, step, rank):
    model.skip = rank == 0 and step == 1
    return model.loss(batch(step, rank))


def loss_that_changes(model, step, rank):
    return model.loss(batch(step, rank)) * (1.0 + 0.1 * next(calls) ** 2)
