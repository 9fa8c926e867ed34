"""What the commands ``python -m dist_lib.<package>`` share: sub-commands, errors as one line, tables as text.

A sub-command is a function that adds its parser and sets ``run``, which takes the parsed arguments and returns what to
print. It knows nothing of the packages, and it is not for the labs, which have Typer and Rich.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

Run = Callable[[argparse.Namespace], str]
Add = Callable[[Any], None]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned with spaces, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * w for w in widths), *map(line, rows)])


def run_command(package: str, description: str, commands: Sequence[Add], argv: Sequence[str] | None) -> int:
    """Run one sub-command and print what it returns.

    Args:
        package: for the usage line.
        description: for ``--help``.
        commands: add the sub-commands' parsers.
        argv: arguments; None takes those of the process.

    Returns:
        0; or 2 after an error of the caller (a value, a name, a file, a package that is missing), told in one line on
        standard error.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description=description)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in commands:
        add(subparsers)
    args = parser.parse_args(argv)
    run: Run = args.run
    try:
        text = run(args)
    except (ValueError, KeyError, OSError, ModuleNotFoundError) as error:
        message = error.args[0] if isinstance(error, KeyError) else error
        sys.stderr.write(f"error: {message}\n")
        return 2
    sys.stdout.write(text)
    return 0
