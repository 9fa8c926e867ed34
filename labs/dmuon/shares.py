"""What each idea contributes to the optimizer's gain, by the cost model: the paper's second table in two orders.

A share depends on what was taken away before it, and the paper does not print its order. So both orders are modelled:
the kernel first, or the owners first.
"""

from __future__ import annotations

from dist_lib.dmuon.cost_model import Hardware, optimizer_times
from dist_lib.dmuon.plan import make_plan
from dist_lib.dmuon.workloads import workload


def stages(model: str, world: int, *, gradient_bytes: int) -> dict[str, float]:
    """Modelled seconds of the optimizer with neither idea, with one, and with both.

    Args:
        model: name of a workload.
        world: ranks.
        gradient_bytes: of an element that the baseline gathers.

    Returns:
        ``"neither"``: direct form on every rank, gradients gathered; ``"kernel"``: the same with symmetric products in
        Gram space; ``"owners"``: direct form, matrices dealt out by cost; ``"both"``.
    """
    hw, specs = Hardware(), workload(model)
    times = optimizer_times(model, world, gradient_bytes=gradient_bytes)
    owned = hw.owned_cost()
    direct = make_plan(specs, world, cost=hw.direct_cost())
    return {
        "neither": times.gathering,
        "kernel": sum(owned.of(m.shape, 1) for m in specs) + times.gather,
        "owners": max(direct.rank_loads) + times.memory + times.fixed,
        "both": times.dmuon,
    }


def kernel_shares(model: str, world: int, *, gradient_bytes: int) -> tuple[float, float]:
    """Share of the whole gain that the kernel brings when it comes first, and when the owners come first."""
    found = stages(model, world, gradient_bytes=gradient_bytes)
    gain = found["neither"] - found["both"]
    return (found["neither"] - found["kernel"]) / gain, (found["owners"] - found["both"]) / gain
