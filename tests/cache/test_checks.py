"""Sizes and numbers out of range, in every public function of ``cache`` that takes any."""

import dataclasses
import inspect
import math

import numpy as np
import pytest

import cache
from cache.managers.base import CacheOptions
from cache.serving.open_loop import poisson_arrivals
from cache.serving.scheduler import Scheduler
from cache.traces.convert import convert_ragpulse, convert_sessions

TRACE = cache.Trace.from_requests([(0, 8, 1, [0, 1])] * 2, name="t", block_size=4)
VALID = {
    "trace": TRACE, "manager": cache.make_manager("vllm_v1", num_blocks=8, block_size=4),
    "policy": "lru", "path": "t.jsonl", "requests": (), "name": "vllm_v1", "folder": "t",
    "gpu_memory_utilization": 0.9, "rng": np.random.default_rng(0),
    "options": CacheOptions(num_blocks=8, block_size=4),
}  # fmt: skip
"""Required arguments that 1 does not do for."""
FUNCTIONS = [
    *cache.MANAGERS.values(), *cache.POLICIES.values(), *cache.WORKLOADS.values(),
    *(getattr(cache, name) for name in cache.__all__ if name.islower() and name != "make_workload"),
    cache.ServiceModel, Scheduler, TRACE.coarsened, cache.Trace.from_requests,
    convert_ragpulse, convert_sessions, poisson_arrivals,
]  # fmt: skip
MAY_BE_LARGE = {
    "capacity_blocks", "max_decompressed_bytes", "seed", "index", "ttl_s",
    "prefill_tokens_per_second",
}  # fmt: skip
MAY_BE_0 = {
    "num_cpu_blocks", "num_host_blocks", "peak_bytes", "swap_space_bytes", "used_tokens", "count",
    "num_requests", "retention", "host_blocks",
}  # fmt: skip


def parameters_of(function):
    found = inspect.signature(function).parameters.values()
    return [each for each in found if each.kind is not each.VAR_KEYWORD]


def wrong_values():
    for function in FUNCTIONS:
        for parameter in parameters_of(function):
            name, values = parameter.name, []
            annotated = inspect.formatannotation(parameter.annotation).strip("'").split(" | ")
            kinds = type(parameter.default).__name__, *annotated
            if "int" in kinds:
                values = [2**70, -(2**70), 1.5, "4", True, *[0] * (name not in MAY_BE_0)]
                values += [None] * ("None" not in kinds)
            elif "float" in kinds:
                values = [math.nan, math.inf, -1.0]
            if values and name not in MAY_BE_LARGE:
                yield pytest.param(function, name, values, id=f"{function.__name__}-{name}")


@pytest.mark.parametrize(("function", "name", "values"), [*wrong_values()])
def test_a_size_or_number_out_of_range_is_named(function, name, values):
    required = [each.name for each in parameters_of(function) if each.default is each.empty]
    arguments = {each: VALID.get(each, 1) for each in required}
    if name == "sliding_window" and function is cache.MANAGERS["vllm_v0"]:
        arguments["options"] = dataclasses.replace(VALID["options"], enable_prefix_caching=False)
    for value in values:
        with pytest.raises(ValueError, match=f"{name}(=| must)"):
            function(**arguments | {name: value})
