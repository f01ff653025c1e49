"""``python -m experiments``."""

from __future__ import annotations

if __name__ == "__main__":
    from experiments.cli import main

    raise SystemExit(main())
