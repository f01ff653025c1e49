"""Host time of the control path: trace replay, cache managers, engine steps.

There are three parts (``--part``).  The method of a part is described in its file in this folder:

* ``replay``: ``cache.simulate`` on a trace, compared with libcachesim.
* ``managers``: hash, look-up, allocate and free of a request, and vLLM's ``KVCacheManager``.
* ``engine``: the scheduler's part of an engine step, compared with vLLM's scheduler.

Times are in microseconds per unit of work: columns ``us`` (median), ``us_p20``, ``us_p80`` and
``us_mean``, with the unit in ``per``.  Columns that a part does not have are empty.  Systems for
comparison run if they can be imported (``baselines.py`` says how to install them).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from experiments import style
from experiments.harness import Absent, Axis, Experiment, Options
from experiments.overhead import engine, managers, replay

_PARTS = {
    "replay": (replay, replay.ReplayCell),
    "managers": (managers, managers.ManagersCell),
    "engine": (engine, engine.Engine),
}


@dataclass(frozen=True, kw_only=True)
class Overhead(replay.Replay, managers.Managers, engine.Engine):
    """The options of all parts."""

    part: Axis[Literal["replay", "managers", "engine"]] = tuple(_PARTS)
    """Parts to run."""


def cells(options: Overhead) -> Iterator[Options | Absent]:
    for part in options.part:
        module, _ = _PARTS[part]
        yield from module.cells(options)


def run_cell(cell: Options) -> list[dict[str, Any]]:
    part = next(part for part, (_, type_) in _PARTS.items() if type(cell) is type_)
    return [{"part": part, **row} for row in _PARTS[part][0].run_cell(cell)]


EXPERIMENT = Experiment(
    name="overhead",
    figure="host time of replay, cache managers and engine steps",
    options=Overhead(),
    quick=Overhead(
        policy=("lru", "lfu", "mq", "belady"),  # compiled by eviction's quick run, too
        repeats=2,
        trace_requests=1_000,
        pool_blocks=(1_000, 10_000),
        pool_requests=100,
        manager=("vllm_v1", "paged"),
        num_sequences=(1, 16, 256),
        num_steps=50,
    ),
    cells=cells,
    run_cell=run_cell,
    plot=style.plotter(
        {part: style.of_parts(module.draw, part) for part, (module, _) in _PARTS.items()},
        {
            part: (style.of_parts(module.table, part), "%.3f")
            for part, (module, _) in _PARTS.items()
        },
    ),
    gpu="optional",
    timed=True,
)
