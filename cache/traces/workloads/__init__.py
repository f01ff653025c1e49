"""Seeded synthetic workloads, for use without traces and for effects that traces do not show.

A workload is a generator of requests in its own file.  ``@workload`` turns the generator into a
function that returns a ``Trace``.  Keyword arguments are the options of the workload.  To add a
workload, write a file and list its function in ``WORKLOADS``.

In all workloads only full blocks have ids.  With the same seed and options, a longer workload
begins with the requests of a shorter workload.
"""

from collections.abc import Callable

from cache.traces.trace import Trace
from cache.traces.workloads.agent_loops import agent_loops
from cache.traces.workloads.multi_turn_chat import multi_turn_chat
from cache.traces.workloads.parallel_sampling import parallel_sampling
from cache.traces.workloads.rag import rag
from cache.traces.workloads.shared_system_prompts import shared_system_prompts

__all__ = ["WORKLOADS", "make_workload"]

WORKLOADS: dict[str, Callable[..., Trace]] = {
    make.__name__: make
    for make in (shared_system_prompts, multi_turn_chat, agent_loops, parallel_sampling, rag)
}


def make_workload(
    name: str,
    *,
    seed: int = 0,
    block_size: int | None = None,
    num_requests: int | None = None,
    **options: object,
) -> Trace:
    """Generate the synthetic workload ``name``.  Same arguments, same trace, on every machine.

    The function ``WORKLOADS[name]`` documents the options and defines the defaults of
    ``block_size`` (tokens), ``num_requests`` and ``options``.  Timestamps are whole milliseconds.

    Raises ValueError for an unknown name or option (the message lists the choices), and for a value
    out of range (the message has the bounds).
    """
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; choose from {', '.join(WORKLOADS)}")
    common = {"seed": seed, "block_size": block_size, "num_requests": num_requests}
    options |= {option: value for option, value in common.items() if value is not None}
    return WORKLOADS[name](**options)
