"""Entry of ``python -m dist_lib.agoq``; see :mod:`dist_lib.agoq.cli`."""

from dist_lib.agoq.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
