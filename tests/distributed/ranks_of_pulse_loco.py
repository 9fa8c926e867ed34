"""What the ranks of test_pulse_loco_ranks do: train together, stop and go on, disagree, bring NaN, die."""

import math
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from dist_lib.comm import CommCounter
from dist_lib.comm.context import init_from_file
from dist_lib.models import Decoder, DecoderConfig
from dist_lib.optim import MuonWithAdamW
from dist_lib.pulse import DataParallel, DenseDiLoCo, OuterConfig, PulseLoCo, resume, save_checkpoint
from dist_lib.pulse.loco_exchange import Channel

TINY = DecoderConfig(
    vocab_size=32, d_model=16, n_layers=2, n_heads=2, n_kv_heads=2, d_ff=32, max_seq_len=8, tie_embeddings=True
)
KINDS = {"pulse": PulseLoCo, "diloco": DenseDiLoCo, "ddp": DataParallel}


def make(kind="pulse", *, inner="adamw", lr=1e-4, inner_steps=2, seed=0, group=None, **options):
    """A loop around a small decoder; all ranks get the same weights unless seeds differ."""
    model = Decoder(TINY, seed=seed)
    optimizer = MuonWithAdamW(model, lr=lr) if inner == "muon" else torch.optim.AdamW(model.parameters(), lr=lr)
    steps = 1 if kind == "ddp" else inner_steps
    return KINDS[kind](model, optimizer, OuterConfig(inner_steps=steps, **options), group)


def advance(loop, steps, *, poison=()):
    """Steps on this rank's own data, which depends on rank and step alone; returns the metrics of closed rounds."""
    found = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(10_000 * dist.get_rank() + loop.steps_done)
        tokens = torch.randint(TINY.vocab_size, (4, 9), generator=generator)
        loop.optimizer.zero_grad()
        loss = loop.model.loss(tokens[:, :-1], tokens[:, 1:])
        (loss * math.nan if (dist.get_rank(), loop.steps_done) in poison else loss).backward()
        if (metrics := loop.step()) is not None:
            found.append(metrics)
    return found


def bits(tensor):
    return tensor.view(torch.int32).tolist()


def attempt(action):
    """The error of this rank, in words, or "nothing"."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def trains(kind, inner):
    """Metrics of each round, the bytes counted, and the last weights."""
    loop = make(kind, inner=inner)
    with CommCounter() as counter:
        metrics = advance(loop, 8)
    weights = torch.cat([p.detach().reshape(-1) for p in loop.model.parameters()])
    error = bits(loop.error) if kind == "pulse" else []
    return metrics, counter.bytes(), bits(weights), error, bits(loop.theta)


def by_hand():
    """PULSELoCo written out densely, in rank order, against the loop: weights, momentum and buffer in every bit."""
    loop, plain = make(), make()
    rank, workers = dist.get_rank(), dist.get_world_size()
    theta, momentum = loop.theta.clone(), torch.zeros(loop.cells)
    errors, unions = torch.zeros(workers, loop.cells), []
    for _ in range(4):
        sums, union = torch.zeros(loop.cells), torch.zeros(loop.cells, dtype=torch.bool)
        plain._write(theta)
        plain.rounds, plain.inner_step = loop.rounds, 0
        for _ in range(2):
            generator = torch.Generator().manual_seed(10_000 * rank + plain.steps_done)
            tokens = torch.randint(TINY.vocab_size, (4, 9), generator=generator)
            plain.optimizer.zero_grad()
            plain.model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
            plain.optimizer.step()
            plain.inner_step += 1
        moved = [torch.empty(loop.cells) for _ in range(workers)]
        dist.all_gather(moved, plain._weights())
        for r, w in enumerate(moved):
            s = (theta - w) + errors[r]
            seen = theta.bfloat16().view(torch.int16) != (theta - s).bfloat16().view(torch.int16)
            sums += torch.where(seen, s, torch.zeros(()))
            errors[r] = torch.where(seen, torch.zeros(()), s)
            union |= seen
        g = sums / workers
        momentum = momentum * 0.9 + g
        theta = torch.add(theta, torch.add(g, momentum, alpha=0.9), alpha=-0.7)
        (metrics,) = advance(loop, 2)
        unions.append((int(union.sum()), metrics.union_cells))
        assert torch.equal(loop.theta, theta) and torch.equal(loop.error, errors[rank])
        assert torch.equal(loop.momentum, momentum)
    return unions


def stops(folder, at):
    """Ten steps in one go, and ten with a checkpoint and new objects after ``at``; all bits of both."""
    straight = make()
    advance(straight, 10)
    first = make()
    advance(first, at)
    path = save_checkpoint(first, folder)
    second = make()
    resumed = resume(second, folder)
    advance(second, 10 - at)
    return [[bits(loop.theta), bits(loop.momentum), bits(loop.error)] for loop in (straight, second)], path, resumed


def poisoned(kind):
    """Rank 1 brings NaN in the second round: what each rank sees, and how it goes on."""
    loop = make(kind)
    advance(loop, 2)
    before = getattr(loop, "error", torch.zeros(1)).clone()
    length = loop.config.inner_steps
    (metrics,) = advance(loop, length, poison={(1, loop.steps_done)})
    kept = torch.equal(before, getattr(loop, "error", torch.zeros(1)))
    state = len(loop.optimizer.state)
    after = advance(loop, 4)
    finite = all(bool(torch.isfinite(p).all()) for p in loop.model.parameters())
    return metrics.dropped, metrics.sent_cells, kept, state, after[-1].dropped, finite, bits(loop.theta)


def all_poisoned():
    loop = make()
    return attempt(lambda: advance(loop, 2, poison={(r, 0) for r in range(4)}))


def refused(folder):
    """For each mistake of rank 1, what every rank sees; the group must stay usable."""
    odd = dist.get_rank() == 1
    drifted, late, torn = make(), make(), make()
    if odd:
        drifted.momentum[3] += 1e-3
    advance(torn, 2)
    path = save_checkpoint(torn, folder)
    dist.barrier()
    if odd:
        file = path / "rank-00001.pt"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    dist.barrier()
    state = make().state_dict()
    return {
        "options": attempt(lambda: make(outer_lr=0.5 if odd else 0.7)),
        "method": attempt(lambda: make("diloco" if odd else "pulse")),
        "weights": attempt(lambda: make(seed=int(odd))),
        "drift": attempt(lambda: advance(drifted, 2)),
        "what": attempt(lambda: save_checkpoint(late, folder) if odd else advance(late, 2)),
        "state": attempt(lambda: make().load_state_dict({**state, "format": 1 + odd})),
        "mixed": attempt(lambda: make().load_state_dict({**state, "rounds": int(odd)})),
        "damaged": attempt(lambda: resume(make(), folder)),
        "nowhere": resume(make(), folder / "nowhere"),
        "then": len(advance(make(), 2)),
    }


def saves(folder, steps, group):
    """A checkpoint of a smaller group, and this rank's buffer."""
    loop = make(group=group)
    advance(loop, steps)
    save_checkpoint(loop, folder)
    return bits(loop.theta), bits(loop.momentum), loop.error.tolist()


def continues(folder, group=None):
    """Resume with whatever number of ranks there is, and go on for a round."""
    loop = make(group=group)
    resumed = resume(loop, folder)
    start = bits(loop.theta), bits(loop.momentum), loop.error.tolist()
    (metrics,) = advance(loop, 2)
    return resumed, start, metrics.digest, metrics.round


def elastic(folder):
    """Three ranks save after three rounds, and within the fourth; two, then four go on."""
    rank, three, two = dist.get_rank(), dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    found = {"saved": saves(folder, 6, three) if rank < 3 else None}
    found["more"] = continues(folder)
    if rank < 3:
        saves(folder, 7, three)
    found["fewer"] = continues(folder, two) if rank < 2 else None
    return found


def twin_of_torch():
    """Two ranks: data parallelism here and torch's own; sums of two terms have one order, so bits must be equal."""
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return None
    loop, plain = make("ddp", group=group), make("ddp", group=group)
    wrapped = torch.nn.parallel.DistributedDataParallel(plain.model, process_group=group)
    with CommCounter() as ours:
        advance(loop, 3)
    with CommCounter() as theirs:
        for step in range(3):
            generator = torch.Generator().manual_seed(10_000 * dist.get_rank() + step)
            tokens = torch.randint(TINY.vocab_size, (4, 9), generator=generator)
            plain.optimizer.zero_grad()
            logits = wrapped(tokens[:, :-1])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            plain.optimizer.step()
    return bits(loop.theta), bits(plain._weights()), ours.bytes(), theirs.bytes("all_reduce"), loop.cells


def hangs(folder):
    """The last rank does not come; the others give up by themselves, while it is still there."""
    folder.mkdir(exist_ok=True)
    loop = make()
    dist.barrier()  # connecting has the same timeout: begin it together
    loop.channel = Channel(dist.new_group(timeout=timedelta(seconds=5)))
    others, end = dist.get_world_size() - 1, time.monotonic() + 60
    texts = ("came back", "")
    if dist.get_rank() < others:
        texts = attempt(lambda: advance(loop, 2)), attempt(lambda: advance(loop, 1))
        (folder / f"gave-up-{dist.get_rank()}").touch()
    while len(list(folder.iterdir())) < others and time.monotonic() < end:
        time.sleep(0.1)
    return *texts, len(list(folder.iterdir()))


def everything(folder, runs):
    """All of the above in one start of the processes."""
    return {
        "trains": {run: trains(*run) for run in runs},
        "by hand": by_hand(),
        "stops": {at: stops(folder / f"stops-{at}", at) for at in (4, 5)},
        "poisoned": {kind: poisoned(kind) for kind in KINDS},
        "all poisoned": all_poisoned(),
        "refused": refused(folder / "refused"),
        "elastic": elastic(folder / "elastic"),
        "twin": twin_of_torch(),
        "hangs": hangs(folder / "hangs"),
    }


def dies(rank, directory, world_size, victim):
    """A process of its own: checkpoints after every round; one is killed within the third; the others write why."""
    torch.set_num_threads(1)
    init_from_file(os.path.join(directory, "rendezvous"), rank, world_size, device="cpu", timeout_s=30.0)
    loop = make()

    def run():
        while loop.rounds < 6:
            advance(loop, 1)
            if rank == victim and loop.steps_done == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            if loop.inner_step == 0:
                save_checkpoint(loop, os.path.join(directory, "saved"))

    error = attempt(run)
    with open(os.path.join(directory, f"rank-{rank}"), "w") as file:
        file.write(error)
    os._exit(0)
