"""The command line of the labs, with Typer and Rich."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dist_lib import results
from dist_lib.comm import LaunchError, choose_device
from labs.framework import SCALES, Lab, LabError, RunSettings, find_lab, lab_names, load_scale
from labs.grading import exercise_names, grade_file
from labs.report import shown, write_report
from labs.running import Request, execute, find_run, read_request, run_directory, write_request

app = typer.Typer(
    help="The labs: one code path from a toy run to a cluster.", no_args_is_help=True, add_completion=False
)
console = Console()
errors = Console(stderr=True)
RUNS = Path("runs")


def fail(error: BaseException) -> typer.Exit:
    """Print an error of the caller or of a rank, and return the exit to raise."""
    kind = "" if isinstance(error, LabError) else f"{type(error).__name__}: "
    errors.print("[bold red]error:[/]", end=" ")
    errors.print(f"{kind}{error}", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(1)


@app.command("list")
def list_labs() -> None:
    """List the labs, and for each scale processes, minutes, memory and disk."""
    table = Table(title="Labs")
    for column in ("lab", "scale", "processes", "minutes", "memory (GiB)", "disk (MiB)", "exercises"):
        table.add_column(column, justify="left" if column in ("lab", "scale", "exercises") else "right")
    for name in lab_names():
        lab = find_lab(name)
        for scale in SCALES:
            _, run = load_scale(lab, scale)
            sizes = [f"{v:g}" for v in (run.world_size, run.minutes, run.memory_gib, run.disk_mib)]
            first = scale == SCALES[0]
            table.add_row(name if first else "", scale, *sizes, ", ".join(exercise_names(name)) if first else "")
    console.print(table)


def _summary(record: results.RunRecord, directory: Path) -> None:
    table = Table(title=f"{record.lab}, {record.scale}: {record.status}", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for key, value in record.metrics.items():
        table.add_row(key.replace("_", " "), shown(value))
    table.add_row("time (s)", shown(record.timings.get("total", 0.0)))
    table.add_row("peak memory (MiB)", shown(record.peak_memory_bytes / 2**20))
    console.print(table)
    console.print(f"record and report: {directory}", soft_wrap=True)


def _run_shown(lab: Lab, request: Request, settings: RunSettings) -> results.RunRecord:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{lab.name} {request.scale}", total=None, numbers="")

        def on_step(row: dict[str, Any]) -> None:
            numbers = "  ".join(f"{k} {v:.4g}" for k, v in row.items() if k not in ("step", "total"))
            progress.update(task, completed=row["step"], total=row["total"], numbers=numbers)

        def on_line(rank: int, text: str) -> None:
            progress.console.print(f"[rank {rank}] {text}", markup=False, highlight=False)

        return execute(request, settings, on_step=on_step, on_line=on_line)


def _require_device(run: RunSettings) -> None:
    try:
        choose_device(run.device, run.world_size - 1, run.world_size)
    except ValueError as error:
        raise LabError(str(error)) from error


@app.command()
def run(
    lab: Annotated[str, typer.Argument(help="name of the lab, see `list`")],
    scale: Annotated[
        str | None, typer.Option(help="toy, ranks, gpu, cluster, or a TOML file of your own", show_default="toy")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value; run.key=value for [run]")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of weights and batches", show_default="0")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    world_size: Annotated[int | None, typer.Option(help="number of processes")] = None,
    out: Annotated[Path, typer.Option(help="folder for runs")] = RUNS,
    resume: Annotated[str | None, typer.Option(help="go on with an earlier run: its folder, or 'latest'")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the configuration and stop")] = False,
) -> None:
    """Run a lab at a scale; under torchrun, as one of its ranks."""
    directory = out / lab
    try:
        found = find_lab(lab)
        if resume is not None:
            given = {
                "--scale": scale,
                "--set": settings,
                "--seed": seed,
                "--device": device,
                "--world-size": world_size,
            }
            if extra := [name for name, value in given.items() if value not in (None, [])]:
                raise LabError(f"--resume goes on with the settings of that run; leave out {', '.join(extra)}")
            directory = find_run(lab, resume, out)
            request, run_settings = read_request(directory, found)
        else:
            scale = scale or SCALES[0]
            config, run_settings = load_scale(found, scale, settings or [])
            changes: dict[str, Any] = {"world_size": world_size, "device": device}
            run_settings = replace(run_settings, **{k: v for k, v in changes.items() if v is not None})
            directory = run_directory(lab, scale, out)
            request = Request(
                lab=lab,
                module=f"labs.{lab}.run",
                scale=Path(scale).stem,
                config=config,
                seed=seed or 0,
                directory=str(directory),
                resumed=False,
            )
        if run_settings.world_size < 1 or run_settings.device not in ("auto", "cpu", "cuda"):
            raise LabError(
                f"world_size {run_settings.world_size} and device {run_settings.device!r}: need at least 1 process and "
                f"auto, cpu or cuda"
            )
        if dry_run:
            console.print(request.config)
            console.print(run_settings)
            return
        _require_device(run_settings)
        if resume is None:
            write_request(request, run_settings)
        record = _run_shown(found, request, run_settings)
        write_report(found, record, directory / "report.html")
        _summary(record, directory)
    except (LabError, LaunchError, results.RecordError) as error:
        raise fail(error) from None
    except KeyboardInterrupt:
        errors.print(f"interrupted; go on with: python -m labs run {lab} --resume {directory}")
        raise typer.Exit(130) from None


@app.command()
def check(
    lab: Annotated[str, typer.Argument(help="name of the lab")],
    exercise: Annotated[str | None, typer.Argument(help="name of the exercise; default: all")] = None,
    file: Annotated[Path | None, typer.Option(help="a solution elsewhere than in the lab's folder")] = None,
) -> None:
    """Grade exercises offline; ends with 1 if a check fails."""
    try:
        find_lab(lab)
        if file is not None and exercise is None:
            raise LabError("--file needs the name of the exercise that it solves")
        reports = [grade_file(lab, name, file) for name in ([exercise] if exercise else exercise_names(lab))]
    except LabError as error:
        raise fail(error) from None
    for report in reports:
        console.print(f"[bold]{report.exercise}[/]")
        for result in report.results:
            console.print("  [green]pass[/]" if result.passed else "  [red]fail[/]", result.name)
            for text in (result.message, result.hint and f"hint: {result.hint}"):
                if text:
                    console.print(f"       {text}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if all(r.passed for r in reports) else 1)


@app.command()
def compare(runs: Annotated[list[Path], typer.Argument(help="folders of two or more runs")]) -> None:
    """Put runs side by side: settings that differ, then metrics."""
    try:
        records = [results.load(path) for path in runs]
    except results.RecordError as error:
        raise fail(error) from None
    table = Table()
    table.add_column("what")
    for path in runs:
        table.add_column(path.name, justify="right")
    for name, values in results.compare(records).items():
        table.add_row(name, *["" if v is None else shown(v) for v in values])
    console.print(table)


@app.command()
def report(directory: Annotated[Path, typer.Argument(help="folder of a run")]) -> None:
    """Write the HTML report of a run again and say where it is."""
    try:
        record = results.load(directory)
        path = write_report(find_lab(record.lab), record, directory / "report.html")
    except (LabError, results.RecordError) as error:
        raise fail(error) from None
    console.print(str(path), soft_wrap=True)


@app.command()
def bench(
    lab: Annotated[str | None, typer.Argument(help="only the rows of this lab")] = None,
    pairs: Annotated[int, typer.Option(min=3, help="timed pairs of ours and baseline")] = 7,
    save: Annotated[bool, typer.Option("--save", help="write data/results/bench-<hardware>.json")] = False,
) -> None:
    """Time ours against baselines, alternating, and compare the ratios with their targets."""
    from labs.bench import run_rows

    try:
        met = run_rows(console, lab, pairs, save)
    except LabError as error:
        raise fail(error) from None
    raise typer.Exit(0 if met else 1)


@app.command()
def doctor() -> None:
    """Say what this machine has, and what would not run here."""
    from labs.doctor import examine

    raise typer.Exit(0 if examine(console) else 1)


@app.command("gpu-check", add_help_option=False, context_settings={"ignore_unknown_options": True})
def gpu_check(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Check and time the kernels on a GPU (needs torch, triton and numpy only)."""
    from labs.gpu_check import main

    raise typer.Exit(main(arguments or []))


def lab_main(lab: Lab) -> None:
    """The command line of ``python -m labs.<lab>.run`` and of ``torchrun -m labs.<lab>.run``."""
    single = typer.Typer(add_completion=False)

    @single.command(help=lab.title)
    def _run(
        scale: Annotated[str, typer.Option(help="toy, ranks, gpu, cluster, or a TOML file")] = "cluster",
        settings: Annotated[list[str] | None, typer.Option("--set", help="key=value")] = None,
        seed: Annotated[int, typer.Option(help="seed of weights and batches")] = 0,
        device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
        out: Annotated[Path, typer.Option(help="folder of this run; state in it is resumed with --resume")] = RUNS,
        resume: Annotated[bool, typer.Option("--resume", help="go on from the state in --out")] = False,
    ) -> None:
        _torchrun(lab, scale, settings or [], seed, device, out, resume)

    single()


def _torchrun(
    lab: Lab, scale: str, settings: list[str], seed: int, device: str | None, out: Path, resume: bool
) -> None:
    import os

    world, main_rank = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
    try:
        config, run_settings = load_scale(lab, scale, settings)
        run_settings = replace(run_settings, world_size=world, device=device or run_settings.device)
        directory = out / lab.name / f"{Path(scale).stem}-world{world}"  # the same on every rank, without a clock
        request = Request(
            lab=lab.name,
            module=f"labs.{lab.name}.run",
            scale=Path(scale).stem,
            config=config,
            seed=seed,
            directory=str(directory),
            resumed=resume,
        )
        if main_rank:
            write_request(request, run_settings)
        on_step = (lambda row: console.print(row)) if main_rank else None
        record = execute(request, run_settings, on_step=on_step)
    except (LabError, LaunchError, results.RecordError) as error:
        raise fail(error) from None
    if main_rank:
        write_report(lab, record, directory / "report.html")
        _summary(record, directory)
