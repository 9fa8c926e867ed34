"""Rank functions of the tests of sharded publishing."""

import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from dist_lib.comm.agreement import AgreementError
from dist_lib.pulse import Publisher, PulseError, Retry, StateError, Store, Subscriber, digest_state
from dist_lib.pulse.manifest import marker_name
from dist_lib.pulse.shards import ShardedPublisher, assemble_rows, local_rows, own_rows, poll_together

ONCE = Retry(attempts=1)


class Net(nn.Module):
    """Tied embedding, rows that no number of ranks divides, fewer rows than ranks, a scalar-like norm, a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.hidden = nn.Linear(6, 7)
        self.few = nn.Linear(6, 1)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(3))


def build(replicas=1):
    torch.manual_seed(0)
    model, world = Net().bfloat16(), dist.get_world_size()
    shape = (world,) if replicas == 1 else (replicas, world // replicas)
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]))
    return model


def change(model, step):
    """Move some rows, the same way on all ranks."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            full = p.full_tensor().clone()
            full.view(-1)[(step + len(name)) % full.numel()] += step + 1
            p.copy_(distribute_tensor(full, p.device_mesh, p.placements))
        model.count += 1


def whole(model):
    """The state with full tensors; tied ones tied."""
    full = {}
    out = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).data_ptr(), tuple(tensor.shape)
        if key not in full:
            full[key] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
        out[name] = full[key]
    return out


def holds(subscriber, state):
    return digest_state(assemble_rows(subscriber.state)).whole == digest_state(state).whole


def said(call):
    try:
        call()
    except (PulseError, OSError, AgreementError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def follow_versions(folder, replicas=1):
    """Five versions, an anchor every other: full receivers, receivers of a part, a late one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, store = build(replicas), Store(folder, retry=ONCE)
    publisher = ShardedPublisher(Publisher(store, anchor_every=2, workers=1))
    full = Subscriber(Store(folder), workers=1)
    part = Subscriber(Store(folder), workers=1, part=(rank, world))
    wrong, steps, sizes = [], [], []
    for step in range(5):
        change(model, step)
        done = publisher.publish(model.state_dict())
        sizes.append((done.version, done.patch_bytes > 0, done.anchor_bytes > 0))
        update = poll_together(full)
        steps.append(update.steps)
        poll_together(part)
        if not holds(full, whole(model)):
            wrong.append(f"full {step}")
        mine = local_rows(model.state_dict(), rank=rank)
        if digest_state(part.state).whole != digest_state(mine).whole:
            wrong.append(f"part {step}")
        if replicas == 1:
            for name, rows in own_rows(part.state).items():
                tensor = model.state_dict()[name]
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                if not torch.equal(rows.view(torch.uint8), local.view(torch.uint8)):
                    wrong.append(f"{name} {step}")
        tied = assemble_rows(full.state)
        if tied["embed.weight"] is not tied["head.weight"]:
            wrong.append("tie")
        dist.barrier()
    late = Subscriber(Store(folder), workers=1)
    late.poll()
    if not holds(late, whole(model)):
        wrong.append("late")
    parts = [len(full._parts), len(part._parts)]
    return {"wrong": wrong, "steps": steps, "sizes": sizes, "late": late.version, "parts": parts}


def fail_at(store, write, after):
    """Let a store fail at its ``write``-th write from now, once; ``after`` that write was done."""
    put, count = store.put, [0]

    def failing(name, data):
        count[0] += 1
        if count[0] == write + 1:
            if after:
                put(name, data)
            raise OSError("planted")
        put(name, data)

    store.put = failing


def fail_everywhere(folder):
    """Each rank fails at each of its writes of version 1, and then of version 2 with its anchor."""
    rank, outcomes = dist.get_rank(), []
    cases = [
        (who, write, after)
        for who in range(dist.get_world_size())
        for write in range(3 if who else 8)
        for after in (False, True)
    ]
    for number, (who, write, after) in enumerate(cases):
        place = f"{folder}/{number}"
        model, store = build(), Store(place, retry=ONCE)
        publisher = ShardedPublisher(Publisher(store, anchor_every=2, workers=1))
        change(model, 0)
        publisher.publish(model.state_dict())
        receiver = Subscriber(Store(place), workers=1)
        receiver.poll()
        old = whole(model)
        dist.barrier()
        if rank == who:
            fail_at(store, write, after)
        change(model, 1)
        first = said(lambda publisher=publisher, model=model: publisher.publish(model.state_dict()))
        dist.barrier()
        receiver.poll()
        new = whole(model)
        right = holds(receiver, old if receiver.version == 0 else new)
        seen = receiver.version
        change(model, 2)
        second = said(lambda publisher=publisher, model=model: publisher.publish(model.state_dict()))
        dist.barrier()
        update = receiver.poll()
        third = said(lambda publisher=publisher, model=model: publisher.publish(model.state_dict()))
        dist.barrier()
        receiver.poll()
        late = Subscriber(Store(place), workers=1)
        late.poll()
        right = right and holds(receiver, whole(model)) and holds(late, whole(model))
        if first == "nothing" and second == "nothing" and who != 0:
            continue  # this rank makes no more writes
        outcomes.append((who, write, after, first, seen, second, third, update and update.steps, right))
    return outcomes


def refusals(folder):
    rank, world = dist.get_rank(), dist.get_world_size()
    store = Store(folder, retry=ONCE)
    model = build()
    publisher = ShardedPublisher(Publisher(store, workers=1))
    found = {}
    found["options"] = said(lambda: ShardedPublisher(Publisher(store, codec=("fast", "small")[min(rank, 1)])))
    mesh = init_device_mesh("cpu", (world,))
    nan = torch.zeros(world, 2)
    nan[world - 1] = float("nan")
    found["nonfinite"] = said(lambda: publisher.publish({"w": distribute_tensor(nan, mesh, [Shard(0)])}))
    found["columns"] = said(lambda: publisher.publish({"w": distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)])}))
    found["name"] = said(lambda: publisher.publish({"w[0:4]": torch.zeros(4)}))
    found["empty"] = Subscriber(store).poll() is None
    dist.barrier()
    publisher.publish(model.state_dict())
    other = Subscriber(Store(folder), workers=1, part=(0, world + 1))
    found["parts"] = said(other.poll)
    broken = Subscriber(Store(folder, retry=ONCE), workers=1)
    broken.poll()
    change(model, 1)
    publisher.publish(model.state_dict())
    dist.barrier()
    if rank == world - 1:
        broken.store.get = lambda name, most: (_ for _ in ()).throw(OSError("planted"))
    found["together"] = said(lambda: poll_together(broken))
    found["stayed"] = broken.version
    return found


def dies(folder, who, write, after):
    """Version 0, then rank ``who`` is killed at a write of version 1."""
    model, store = build(), Store(folder, retry=ONCE)
    publisher = ShardedPublisher(Publisher(store, anchor_every=2, workers=1))
    publisher.publish(model.state_dict())
    dist.barrier()
    put, count = store.put, [0]

    def deadly(name, data):
        count[0] += 1
        if dist.get_rank() == who and count[0] == write + 1:
            if after:
                put(name, data)
            os.kill(os.getpid(), signal.SIGKILL)
        put(name, data)

    store.put = deadly
    change(model, 1)
    publisher.publish(model.state_dict())


def takes_over(folder):
    """Publish over what is there, and return the version and whether a reader holds it."""
    model = build()
    change(model, 5)
    done = ShardedPublisher(Publisher(Store(folder), workers=1)).publish(model.state_dict())
    late = Subscriber(Store(folder), workers=1)
    late.poll()
    return done.version, late.version == done.version and holds(late, whole(model)), marker_name(0, "anchor")


def all_on_two(folder):
    return {
        "follow": follow_versions(f"{folder}/follow"),
        "fail": fail_everywhere(f"{folder}/fail"),
        "refusals": refusals(f"{folder}/refusals"),
    }


def all_on_four(folder):
    return {
        "follow": follow_versions(f"{folder}/follow"),
        "replicas": follow_versions(f"{folder}/replicas", replicas=2),
        "state_errors": [StateError.__name__],
    }
