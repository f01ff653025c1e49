"""All prompts begin with the same prefix: rates sustained with and without sharing its blocks.

Redoes figure 16 of the PagedAttention paper (Kwon et al., SOSP 2023): LLaMA-13B on an A100 40 GB
translates sentences behind a prefix of one example (80 tokens) or five examples (341 tokens).
``vllm_v1`` stores the prefix's full blocks once, and only the first request computes the blocks.
``paged`` and the reservations store and compute the prefix for every request.

The mean lengths, 30 tokens per sentence and 40 per translation, are assumed, not the data set's.
Clock, cache and search for the rate are the same as in the experiment ``serving``.
"""

from __future__ import annotations

from dataclasses import replace

from experiments import serving, style
from experiments.harness import Experiment
from experiments.serving import Serving


class SharedPrefix(Serving):
    """The options of ``Serving``, for loads whose prompts share a prefix."""


_OPTIONS = SharedPrefix(
    load=("one_shot", "five_shot"),
    host_ms=(10,),
    system=("contiguous_oracle", "paged", "vllm_v1"),
)

EXPERIMENT = Experiment(
    name="shared_prefix",
    figure="PagedAttention fig. 16: sustained rates with a shared prefix, LLaMA-13B modelled",
    options=_OPTIONS,
    quick=replace(_OPTIONS, **serving.QUICK),
    cells=serving.cells,
    run_cell=serving.run_cell,
    plot=style.plotter({"shared_prefix": serving.draw}, {"summary": (serving.summary, "%.4g")}),
)
