"""``python -m experiments``."""

from __future__ import annotations

from experiments.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
