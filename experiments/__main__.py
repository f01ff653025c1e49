"""``python -m experiments``."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["gpu-pass"]:  # needs less than the rest of the command line
        from experiments.gpu.gpu_pass import main as gpu_pass

        raise SystemExit(gpu_pass(sys.argv[2:]))
    from experiments.cli import main

    raise SystemExit(main())
