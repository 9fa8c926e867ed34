"""``python -m labs``: list, run, check, compare, report, bench, doctor, gpu-check.

``gpu-check`` is dispatched before anything else is imported, so that it runs with torch, triton and numpy alone.
"""

import sys


def main() -> None:
    """Dispatch."""
    if sys.argv[1:2] == ["gpu-check"]:
        from labs.gpu_check import main as gpu_check

        raise SystemExit(gpu_check(sys.argv[2:]))
    from labs.cli import app

    app()


if __name__ == "__main__":
    main()
