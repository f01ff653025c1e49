"""Seeded synthetic workloads, for machines without traces and for questions traces cannot answer.

A workload is a generator of requests in a file of its own, which ``@workload`` turns into a
function that returns a ``Trace``; its keyword arguments are its options.  A new one is one file and
one name in ``WORKLOADS``.

All of them number full blocks only, as ``cache.traces.trace`` says.  A longer workload begins with
the shorter one of the same seed and options.
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
    **options,
) -> Trace:
    """Generate the synthetic workload ``name``; the same arguments give the same trace anywhere.

    The function ``WORKLOADS[name]`` documents the options and has the defaults of ``block_size``
    (tokens), ``num_requests`` and ``options``.  Timestamps are whole milliseconds.

    Raises ValueError naming the choices for an unknown name or option, and the bounds for a value
    out of range.
    """
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; choose from {', '.join(WORKLOADS)}")
    common = {"seed": seed, "block_size": block_size, "num_requests": num_requests}
    options |= {option: value for option, value in common.items() if value is not None}
    return WORKLOADS[name](**options)
