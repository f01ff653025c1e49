"""The serial replay of a policy whose methods numba compiles one by one.

``cache.replay.serial`` calls the methods of a policy in Python; the replay here calls compiled ones
in the same order.  A policy joins if its ``operations(trace, capacity)`` gives ``Operations``: the
functions that stand for its methods, and the attributes that these find in ``self`` at the start.

The replay calls ``pin``, ``insert``, ``evict`` and ``release_many``, and ``look_up``, ``tell`` and
``miss`` if there are such.  Blocks and keys are the dense ids of the trace, the parent of a first
block is -1, and several blocks are an array.  A method may call any other of its policy.  It may
assign to attributes that are numbers, and to items of arrays.  A wrapped policy is an attribute,
too: its own ``Operations``.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numba
import numba.extending
import numpy as np
from numba import types
from numba.experimental import structref

import cache
from cache.policies.base import EvictionPolicy, Request
from cache.replay.compiled import borrowed, request_of, warmed_up
from cache.traces.trace import Trace


class Operations(NamedTuple):
    """A policy as functions that numba can compile."""

    name: str
    methods: dict[str, Callable]
    """By the names that they have in ``self``.  These must not change during a process."""
    state: dict[str, Any]
    """Attributes of ``self``: arrays, records, numbers and ``Operations``."""


def replay_of(policy: EvictionPolicy) -> Callable | None:
    """``replay(trace, capacity)``; None, with a warning, if numba cannot compile the policy.

    None as well if it has no ``operations``, or its integers are too large at once.
    """
    run = _warmed_up(policy)
    return run and functools.partial(_replay, run, policy)


def _warmed_up(policy: EvictionPolicy) -> Callable | None:
    trace = Trace.from_requests([(0, 1, 1, [0])], name="tiny")
    try:
        operations = policy.operations(trace, 1)
    except OverflowError:
        return None
    if operations is None:
        return None
    key = _key_of(operations)
    if key not in _RUNS:
        arguments = _arguments(trace, 1, operations)
        _RUNS[key] = warmed_up(_compile(key), arguments, policy.name, (ArithmeticError, ValueError))
    return _RUNS[key]


_RUNS: dict[str, Callable | None] = {}


def _replay(run, policy: EvictionPolicy, trace: Trace, capacity: int):
    return run(*_arguments(trace, capacity, policy.operations(trace, capacity)))


def _arguments(trace: Trace, capacity: int, operations: Operations) -> tuple:
    facts, resident = trace.request_facts, np.zeros(trace.num_unique_blocks, np.bool_)
    block_ids = trace.block_ids.astype(np.int64)  # as all integers, for fewer compilations
    return block_ids, trace.offsets, capacity, facts, resident, _values(operations)


def _values(operations: Operations) -> tuple:
    values = operations.state.values()
    return tuple(_values(value) if isinstance(value, Operations) else value for value in values)


def _compile(key: str) -> Callable:
    def run(block_ids, offsets, capacity, request_facts, resident, state):
        block_ids, resident = borrowed(block_ids), borrowed(resident)
        policy = _make(key, state)
        num_requests = len(offsets) - 1
        hits = np.zeros(num_requests, np.int64)
        evictions = np.zeros(num_requests, np.int64)
        num_resident = 0
        for request in range(num_requests):
            start = offsets[request]
            blocks = block_ids[start : min(offsets[request + 1], start + capacity)]
            facts = request_of(request_facts[request])
            policy.look_up(blocks)
            while hits[request] < len(blocks) and resident[blocks[hits[request]]]:
                hits[request] += 1
            for block in blocks:
                if resident[block]:
                    policy.pin(block)
            policy.tell(Request(facts[0], facts[1], math.nan, facts[3], math.nan, math.nan))
            for depth in range(hits[request], len(blocks)):
                block = blocks[depth]
                if resident[block]:
                    continue
                policy.miss(block)
                if num_resident < capacity:
                    num_resident += 1
                else:
                    resident[policy.evict()] = False
                    evictions[request] += 1
                resident[block] = True
                policy.insert(block, block, blocks[depth - 1] if depth else -1, depth)
            policy.tell(facts)
            policy.release_many(blocks[::-1])
        return hits, evictions

    run.__qualname__ += f".{key.partition(':')[0]}"  # a file for each policy
    return numba.njit(nogil=True, cache=_KINDS[key].is_built_in)(run)


class _Kind(NamedTuple):
    """What the compiled code of ``Operations`` depends on, besides the types of its state."""

    self_type: type[types.StructRef]
    fields: tuple[tuple[str, str], ...]
    """Names of the attributes, each with the key of the policy that it is, or ""."""
    is_built_in: bool


_KINDS: dict[str, _Kind] = {}
"""By keys that have the code of all methods in them: the key of a cached replay has its key."""


def _key_of(operations: Operations) -> str:
    state = operations.state.items()
    fields = ((name, _key_of(of) if isinstance(of, Operations) else "") for name, of in state)
    return _register(operations.name, tuple(operations.methods.items()), tuple(fields))


@functools.cache
def _register(name: str, methods: tuple, fields: tuple) -> str:
    parts = [key for _, key in fields if key]
    modules = [method.__module__ for _, method in methods]
    is_built_in = all(module.startswith(("cache.policies.", "cache.replay.")) for module in modules)
    is_built_in = is_built_in and all(_KINDS[part].is_built_in for part in parts)
    code = f"{_digest()} {parts}" if is_built_in else f"own {len(_KINDS)}"
    key = f"{'.'.join([name, *(part.partition(':')[0] for part in parts)])}: {code}"
    private = {field for field, _ in fields if field.startswith("_")}
    fields = tuple((_FIELD + name if name in private else name, part) for name, part in fields)
    self_type = structref.register(type(name, (types.StructRef,), {}))
    for method_name, method in (dict.fromkeys(_OPTIONAL, _nothing) | dict(methods)).items():
        _add_method(self_type, method_name, method, private)
    _KINDS[key] = _Kind(self_type, fields, is_built_in)
    return key


_FIELD = "field"
"""Before names that begin with an underscore, which a ``StructRef`` cannot have."""
_OPTIONAL = "look_up", "tell", "miss"


def _nothing(self, _argument):
    pass


@functools.cache
def _digest() -> str:
    """Of all files that a built-in policy may get code from."""
    folders = (Path(cache.__file__).parent / name for name in ("policies", "replay"))
    files = sorted(file for folder in folders for file in folder.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _add_method(
    self_type: type[types.StructRef], name: str, method: Callable, private: set[str]
) -> None:
    code = method.__code__
    names = tuple(_FIELD + name if name in private else name for name in code.co_names)
    code = code.replace(co_names=names)
    renamed = FunctionType(code, method.__globals__, name, method.__defaults__, method.__closure__)

    def choose(*_arguments):
        return renamed

    choose.__signature__ = inspect.signature(renamed)
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    numba.extending.overload_method(self_type, name, jit_options=options)(choose)


def _make(key: str, state: tuple):
    """``self`` of the policy with ``key``, in compiled code."""


@numba.extending.overload(_make, prefer_literal=True)
def _(key, state):
    if not isinstance(key, types.StringLiteral):
        return None
    key = key.literal_value
    lines = ["def make(key, state):", "self = new(self_type)"]
    for place, (field, part) in enumerate(_KINDS[key].fields):
        value = f"state[{place}]"
        if part:
            value = f"_make({part!r}, {value})"
        elif isinstance(state[place], types.Array):
            value = f"borrowed({value})"  # the caller of the replay keeps it
        lines.append(f"self.{field} = {value}")
    scope = {"new": structref.new, "self_type": _self_type(key, state)}
    scope |= {"_make": _make, "borrowed": borrowed}
    exec("\n    ".join([*lines, "return self"]), scope)
    return scope["make"]


def _self_type(key: str, state: types.BaseTuple) -> types.StructRef:
    kind = _KINDS[key]
    return kind.self_type([
        (field, _self_type(part, of) if part else types.unliteral(of))
        for (field, part), of in zip(kind.fields, state.types, strict=True)
    ])  # fmt: skip
