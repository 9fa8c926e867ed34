"""Right, written differently: at each moment, what is allowed to run?"""


def stage_order(stage, stages, micro_batches, batches):
    total, forwards, backwards, order = micro_batches * batches, 0, 0, []
    while backwards < total:
        if forwards < total and forwards - backwards < stages - stage:
            order.append(("F", forwards // micro_batches, forwards % micro_batches))
            forwards += 1
        else:
            order.append(("B", backwards // micro_batches, backwards % micro_batches))
            backwards += 1
    return order
