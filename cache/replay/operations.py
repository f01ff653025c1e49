"""The serial replay in compiled code: numba compiles each method of a policy.

``cache.replay.serial`` calls the methods of a policy in Python; this replay calls compiled
functions in the same order.  ``cache.replay.compiled`` makes the ``Operations`` of a policy:
functions that replace its methods, and the initial attributes of ``self``.

The replay calls ``pin``, ``evict`` and ``release_many``, and, if they are defined, ``insert``,
``look_up``, ``tell`` and ``miss``.  Blocks and keys are the dense ids of the trace.  The parent of
a first block is -1.  Several blocks are passed as an array.  A method may call other methods of the
policy, and assign to attributes that are numbers and to items of arrays.  A wrapped policy is an
attribute that is an ``Operations`` object.
"""

import functools
import hashlib
import inspect
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numba.extending
import numpy as np
from numba import types
from numba.core import cgutils, datamodel
from numba.core.base import BaseContext as Context
from numba.core.cgutils import ir
from numba.core.typing.context import BaseContext as TypingContext
from numba.core.typing.templates import AttributeTemplate, Signature
from numba.extending import infer_getattr, models

import cache
from cache.policies.base import request_info
from cache.traces.trace import Trace

Array = np.ndarray
Compiled = Any  # ``self`` of a compiled method: the methods and the state of its ``Operations``
Replayed = tuple[Array, Array]  # hits and evictions of each request


class Operations(NamedTuple):
    """A policy as functions that numba can compile."""

    name: str
    methods: Mapping[str, Any]
    """Functions by the names of the methods.  They must not change during a process."""
    state: dict[str, Any]
    """Attributes of ``self``: arrays, records, numbers and ``Operations``."""


def replay_of(
    name: str,
    operations_of: Callable[[Trace, int], Operations | None],
    prepare: Callable[[Trace, int], tuple[Trace, tuple]] | None = None,
    define: Callable[[str], Callable] | None = None,
) -> Callable[[Trace, int], Replayed] | None:
    """Make ``replay(trace, capacity)``.  It returns hits and evictions of each request.

    ``prepare`` returns the trace that the policy sees, and arguments.  ``define`` makes the
    function to compile, which takes the policy's state and these arguments.  The default is the
    replay without groups.

    Returns None if the policy must run in Python: it has no ``Operations``, its integers are too
    large, or numba cannot compile it.  In the last case it warns.
    """
    prepare, define = prepare or _prepare, define or _define

    def replay(trace: Trace, capacity: int) -> Replayed:
        seen, arguments = prepare(trace, capacity)
        return run(_values(operations_of(seen, capacity)), *arguments)

    trace = Trace.from_requests([(0, 1, 1, [0])], name="tiny")
    try:
        operations = operations_of(trace, 1)
    except OverflowError:
        return None
    if operations is None:
        return None
    key = _key_of(operations)
    if (key, define) in _RUNS:
        return (run := _RUNS[key, define]) and replay
    run = _RUNS[key, define] = _compiled(define(key), key)
    try:
        try:
            replay(trace, 1)
        except Exception:
            if run.signatures or not _KINDS[key].is_built_in:
                raise
            run.recompile()  # the cached code may be damaged, or name a renamed class
            replay(trace, 1)
    except OverflowError:
        return None
    except Exception as error:  # numba raises many types, the policy two types
        if not (run.signatures and isinstance(error, ArithmeticError | ValueError)):
            reason = str(error).partition("\n")[0]
            warnings.warn(f"{name} runs in Python: numba: {reason}", stacklevel=3)
            _RUNS[key, define] = None
            return None
    return replay


_RUNS: dict[tuple[str, Callable], Any] = {}
"""numba dispatchers by key of ``_KINDS`` and defining function; None if numba could not compile the
policy."""


def _compiled(replay: Callable, key: str) -> Any:
    replay.__qualname__ += f".{key.partition(':')[0]}"  # a file for each policy
    return numba.njit(nogil=True, cache=ON_DISK and _KINDS[key].is_built_in)(replay)


def _values(operations: Operations | None) -> tuple:
    assert operations is not None
    values = operations.state.values()
    return tuple(_values(value) if isinstance(value, Operations) else value for value in values)


def _prepare(trace: Trace, capacity: int) -> tuple[Trace, tuple]:
    block_ids = trace.block_ids.astype(np.int64)  # like all integers: fewer compilations
    resident = np.zeros(trace.num_unique_blocks, np.bool_)
    return trace, (block_ids, trace.offsets, capacity, trace.request_facts, resident)


def _finds_folder() -> bool:
    """Whether numba finds a folder for compiled code: its own, or one in the temporary folder that
    another user did not make, because numba runs what it finds."""
    with suppress(RuntimeError):
        numba.njit(cache=True)(_finds_folder)  # looks for its own, compiles nothing
        return True
    with suppress(OSError):
        folder = Path(tempfile.gettempdir(), f"pagelab-{os.geteuid()}")
        folder.mkdir(0o700, exist_ok=True)
        if folder.lstat().st_uid == os.geteuid():
            os.environ["NUMBA_CACHE_DIR"] = str(folder)
            numba.config.reload_config()
            return True
    return False


ON_DISK = _finds_folder()
numba.extending.register_jitable(request_info)


def _define(key: str) -> Callable:
    def replay(
        state: tuple, block_ids: Array, offsets: Array, capacity: int, facts: Array, resident: Array
    ) -> Replayed:
        policy = _make(key, state)
        num_requests = len(offsets) - 1
        hits = np.zeros(num_requests, np.int64)
        evictions = np.zeros(num_requests, np.int64)
        num_resident = 0
        for request in range(num_requests):
            start = offsets[request]
            blocks = block_ids[start : min(offsets[request + 1], start + capacity)]
            policy.look_up(blocks)
            while hits[request] < len(blocks) and resident[blocks[hits[request]]]:
                hits[request] += 1
            for block in blocks:
                if resident[block]:
                    policy.pin(block)
            policy.tell(request_info(facts[request], False))
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
            policy.tell(request_info(facts[request], True))
            policy.release_many(blocks[::-1])
        return hits, evictions

    return replay


class _Self(types.Type):
    """Type of ``self``: a pointer to the attributes of a policy on the stack of the replay."""

    def __init__(self, policy: str, state: Any) -> None:
        self.attributes: dict[str, types.Type] = {
            name: _KINDS[part].self_type(part, of) if part else types.unliteral(of)
            for (name, part), of in zip(_KINDS[policy].fields, state.types, strict=True)
        }
        self.values = types.Tuple(tuple(self.attributes.values()))
        super().__init__(f"{policy}{state}")


class _Model(models.PrimitiveModel):
    def __init__(self, manager: datamodel.DataModelManager, self_type: _Self) -> None:
        values = manager.lookup(self_type.values).get_value_type()
        super().__init__(manager, self_type, values.as_pointer())


@infer_getattr
class _Attributes(AttributeTemplate):
    key = _Self

    def generic_resolve(self, of: _Self, name: str) -> types.Type | None:  # type: ignore[override] # numba's is a constant
        return of.attributes.get(name)


def _pointer(builder: ir.IRBuilder, self: ir.Value, self_type: _Self, name: str) -> ir.Value:
    return cgutils.gep_inbounds(builder, self, 0, list(self_type.attributes).index(name))


@numba.extending.lower_getattr_generic(_Self)
def _(_: Context, builder: ir.IRBuilder, self_type: _Self, self: ir.Value, name: str) -> ir.Value:
    value, of = builder.load(_pointer(builder, self, self_type, name)), self_type.attributes[name]
    if isinstance(of, types.Array):  # without an owner: skips reference counting
        owner = value.type.elements[0]
        value = builder.insert_value(value, cgutils.get_null_value(owner), 0)
    return value


@numba.extending.lower_setattr_generic(_Self)
def _(context: Context, builder: ir.IRBuilder, call: Signature, values: tuple, name: str) -> None:
    (self_type, of), (self, value) = call.args, values
    value = context.cast(builder, value, of, self_type.attributes[name])
    builder.store(value, _pointer(builder, self, self_type, name))


_intrinsic: Any = numba.extending.intrinsic(prefer_literal=True)  # callers pass values, not types


@_intrinsic
def _make(_context: TypingContext, key: types.Type, state: types.BaseTuple) -> tuple | None:
    """Make ``self`` of the policy with ``key``.  It lives until the calling function returns."""
    if not isinstance(key, types.StringLiteral):
        return None
    self_type = _KINDS[key.literal_value].self_type(key.literal_value, state)

    def generate(context: Context, builder: ir.IRBuilder, _: Signature, values: tuple) -> ir.Value:
        return _store(context, builder, self_type, state, values[1])

    return self_type(key, state), generate


def _store(
    context: Context, builder: ir.IRBuilder, self_type: _Self, state: Any, values: ir.Value
) -> ir.Value:
    self = cgutils.alloca_once(builder, context.get_value_type(self_type.values))
    for i, (name, of) in enumerate(self_type.attributes.items()):
        value = builder.extract_value(values, i)
        if isinstance(of, _Self):
            value = _store(context, builder, of, state.types[i], value)
        builder.store(value, _pointer(builder, self, self_type, name))
    return self


class _Kind(NamedTuple):
    """Everything that compiled ``Operations`` depend on, except the types of their state."""

    self_type: type[_Self]
    fields: tuple[tuple[str, str], ...]
    """Pairs (name of an attribute, key of the ``Operations`` that it holds or "")."""
    is_built_in: bool


_KINDS: dict[str, _Kind] = {}
"""Kinds by key.  A key contains a hash of all code, and is part of the key of a cached replay."""


def _key_of(operations: Operations) -> str:
    state = operations.state.items()
    fields = ((name, _key_of(of) if isinstance(of, Operations) else "") for name, of in state)
    return _register(operations.name, tuple(operations.methods.items()), tuple(fields))


@functools.cache
def _register(name: str, methods: tuple, fields: tuple) -> str:
    parts = [key for _, key in fields if key]
    functions = [each for _, method in methods for each in _with_closure(method)]
    is_built_in = all(_KINDS[part].is_built_in for part in parts) and all(
        function.__module__.startswith(("cache.policies.", "cache.replay."))
        for function in functions
    )
    places = [(each.__module__, each.__code__.co_firstlineno) for each in functions]
    code = hashlib.sha256(f"{_digest()} {parts} {places}".encode()).hexdigest()
    code = code if is_built_in else f"own {len(_KINDS)}"
    key = f"{'.'.join([name, *(part.partition(':')[0] for part in parts)])}: {code}"
    self_type = type(name, (_Self,), {})
    numba.extending.register_model(self_type)(_Model)
    jit_options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True}
    options: dict[str, Any] = {"jit_options": jit_options}
    for method_name, method in (_OPTIONAL | dict(methods)).items():
        choose = functools.wraps(method)(lambda *_, method=method: method)
        numba.extending.overload_method(self_type, method_name, **options)(choose)
    _KINDS[key] = _Kind(self_type, fields, is_built_in)
    return key


_OPTIONAL: dict[str, Callable] = dict.fromkeys(("look_up", "tell", "miss"), lambda self, _: None)
_OPTIONAL["insert"] = lambda self, block, key, parent, depth: None


def _with_closure(function: Callable) -> list[Callable]:
    """``function`` and all functions in its closure."""
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    return [function, *(f for g in held if inspect.isfunction(g) for f in _with_closure(g))]


@functools.cache
def _digest() -> str:
    """Hash of all files that can contain code of a built-in policy."""
    folders = (Path(cache.__file__).parent / name for name in ("policies", "replay"))
    files = sorted(file for folder in folders for file in folder.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
