"""Experiments: each runs a grid of cells and writes a table, its environment and its figures.

An experiment is one file, or a folder with helpers.  It defines an ``Experiment``, which
``registry.py`` lists.  Shared by all experiments:

harness/     runs cells, resumes sweeps, writes results
load/        traces and lengths, models and arrivals for experiments on caches and engines
gpu/         experiments that need a GPU
bench/       ops at real sizes, checked and timed, for experiments on kernels
style        the look of figures; quantiles: repeated measurements in them

``cli.py`` is the command line.
"""

import runpy
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_CHECKS = runpy.run_path(str(_ROOT / "models/_siblings.py"))  # ``models`` may be hidden as well
_CHECKS["check_siblings"](_ROOT, "cache", "kernels", "models")

TRACES = Path(__file__).with_name("traces")
"""Folder of the request traces in the repository, also in an installed wheel."""
