"""A prefix that all requests share: rates sustained with and without sharing it.

Redoes figure 16 of the PagedAttention paper (Kwon et al., SOSP 2023): LLaMA-13B on an A100 40 GB
translates sentences behind a prefix of one example (80 tokens) or five (341 tokens).  ``vllm_v1``
stores the full blocks of the prefix once and computes them for the first request alone, which saves
memory and time; ``paged`` and the reservations store and compute them for every request.

Sentences have 30 tokens on average and translations 40 (assumed, not the data set's).  All else is
as in the experiment ``serving``: clock, cache, and what it means to sustain a rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from experiments import serving, style
from experiments.harness import Axis, Experiment, Natural, one_of
from experiments.serving import Serving

_SYSTEMS = ("contiguous_oracle", "paged", "vllm_v1")


@dataclass(frozen=True, kw_only=True)
class SharedPrefix(Serving):
    """The grid: prefixes x host times x draws x systems; a cell looks for the rate."""

    load: Axis[Annotated[str, one_of(serving.LOADS)]] = ("one_shot", "five_shot")
    """Requests, with one example or five."""
    host_ms: Axis[Natural] = (10,)
    """Assumed time of the engine's own code in each step."""
    system: Axis[Annotated[str, one_of(serving.SYSTEMS)]] = _SYSTEMS
    """Managers."""


EXPERIMENT = Experiment(
    name="shared_prefix",
    figure="PagedAttention fig. 16: sustained rates with a shared prefix, LLaMA-13B modelled",
    options=SharedPrefix(),
    quick=SharedPrefix(**serving.QUICK),
    cells=serving.cells,
    run_cell=serving.run_cell,
    plot=style.plotter({"shared_prefix": serving.draw}, {"summary": (serving.summary, "%.4g")}),
)
