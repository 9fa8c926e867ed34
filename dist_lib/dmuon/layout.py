"""Which rank takes which matrix, once it is known how many of each shape a rank takes.

Ranks are interchangeable for a solver; they are not for a network. The paper (DMuon, arXiv 2606.27153, eq. 3) sends
consecutive matrices to different GPUs, hence network rails, and lets the node rotate. :func:`slot` is that rule for any
number of nodes and GPUs; :func:`assign_names` follows it as closely as given quotas allow and spreads each layer.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key in which ``layers.2`` comes before ``layers.10``."""
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", name) if p)


def layer_of(name: str) -> str:
    """The part of a name up to its first number (``layers.3`` of ``layers.3.mlp.up_proj.weight``), else its module."""
    found = re.match(r"(.*?(?:^|\.)\d+)(?:\.|$)", name)
    return found.group(1) if found else name.rpartition(".")[0]


def slot(index: int, nodes: int, gpus: int) -> tuple[int, int]:
    """``(node, gpu)`` of the ``index``-th matrix.

    ``gpu = w mod G``, ``node = (gpu mod N) xor (floor(w / G) mod N)``; addition modulo N instead of xor when N is no
    power of two. On 4 nodes of 8 GPUs it is the paper's eq. 3; starting from the GPU's number (our generalisation) it
    meets every slot once in N G consecutive matrices for every N and G.

    Raises:
        ValueError: a negative index, or no node or GPU.
    """
    if index < 0 or nodes < 1 or gpus < 1:
        raise ValueError(f"index {index}, {nodes} nodes of {gpus} GPUs: need index >= 0 and at least one of each")
    gpu = index % gpus
    first, turn = gpu % nodes, (index // gpus) % nodes
    node = first ^ turn if nodes & (nodes - 1) == 0 else (first + turn) % nodes
    return node, gpu


def rank_of_slot(index: int, nodes: int, gpus: int) -> int:
    """Global rank of :func:`slot`, nodes being numbered one after the other."""
    node, gpu = slot(index, nodes, gpus)
    return node * gpus + gpu


def assign_names(
    names: Sequence[tuple[str, int]], quotas: Sequence[Sequence[int]], *, nodes: int = 1
) -> dict[str, int]:
    """Give every named matrix a rank.

    Takes matrices in order. Among ranks whose quota of its class is not used up, one is chosen that this layer uses
    least, whose GPU number this layer uses least, whose node it uses least, and that comes next in the order of
    :func:`slot`.

    Args:
        names: ``(name, class)`` in the order of use.
        quotas: for each rank, how many of each class it takes.
        nodes: must divide the number of ranks.

    Raises:
        ValueError: quotas that do not add up to the matrices, or nodes that do not divide the ranks.
    """
    world = len(quotas)
    if nodes < 1 or world % nodes:
        raise ValueError(f"{world} ranks on {nodes} nodes: every node must have the same number of ranks")
    wanted = Counter(kind for _, kind in names)
    for kind in range(len(quotas[0])):
        given = sum(q[kind] for q in quotas)
        if given != wanted[kind]:
            raise ValueError(f"class {kind}: quotas allow {given} matrices, there are {wanted[kind]}")
    gpus = world // nodes
    order = [rank_of_slot(w, nodes, gpus) for w in range(world)]
    place = {rank: w for w, rank in enumerate(order)}
    left = [list(q) for q in quotas]
    by_rank: dict[str, Counter[int]] = defaultdict(Counter)
    by_gpu: dict[str, Counter[int]] = defaultdict(Counter)
    by_node: dict[str, Counter[int]] = defaultdict(Counter)
    owners: dict[str, int] = {}
    for w, (name, kind) in enumerate(names):
        layer = layer_of(name)
        ranks, gpu_uses, node_uses = by_rank[layer], by_gpu[layer], by_node[layer]
        chosen = min(
            (r for r in range(world) if left[r][kind]),
            key=lambda r: (ranks[r], gpu_uses[r % gpus], node_uses[r // gpus], (place[r] - w) % world),
        )
        left[chosen][kind] -= 1
        ranks[chosen] += 1
        gpu_uses[chosen % gpus] += 1
        node_uses[chosen // gpus] += 1
        owners[name] = chosen
    return owners
