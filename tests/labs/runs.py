"""Runs of labs in tests: within this process, or on ranks that ``launch`` started, or as the command line does it."""

from pathlib import Path

from dist_lib.comm import distributed
from labs.framework import RunContext, find_lab, load_scale
from labs.running import Request, execute


def trained(name, config, directory, resumed=False, on_step=None):
    """Run a lab on this rank; return metrics and the logged rows."""
    with distributed(device="cpu") as ctx:
        context = RunContext(ctx, 0, Path(directory), resumed, on_step)
        return find_lab(name).run(config, context), context.history


def finished(name, changes, directory):
    """Run the ``ranks`` scale of a lab with changes as ranks of its own; return the record and the logged steps."""
    config, settings = load_scale(find_lab(name), "ranks", changes)
    request = Request(
        lab=name,
        module=f"labs.{name}.run",
        scale="ranks",
        config=config,
        seed=0,
        directory=str(directory),
        resumed=False,
    )
    steps = []
    record = execute(request, settings, on_step=steps.append)
    assert record.status == "finished"
    return record, steps
