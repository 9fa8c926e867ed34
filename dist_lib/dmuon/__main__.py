"""Entry of ``python -m dist_lib.dmuon``; see :mod:`dist_lib.dmuon.cli`."""

from dist_lib.dmuon.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
