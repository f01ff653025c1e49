"""Atomic instructions on global and shared memory: atom and red (PTX ISA 9.7.13.5, 9.7.13.7).

Threads take effect one after the other, in the order of their numbers. On shared memory acquire and
release order nothing, barriers do. A kernel with atomic instructions on global memory runs program
by program, so a lock is free when the next program asks for it; programs
that wait for a later one of the grid never end here (an ENDLESS fault).
"""

from __future__ import annotations

import numpy as np

from kernels.executor.formats import decode, encode
from kernels.executor.operands import (
    DTYPES,
    PACKED,
    Step,
    Translation,
    Unsupported,
    instruction,
    is_float,
)

_ORDERS = {"relaxed": "", "acquire": "a", "release": "r", "acq_rel": "ar"}
_SCOPES = ("cta", "cluster", "gpu", "sys")
_OPERATIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda _old, new: new,
}


def _operation(name: str, kind: str):
    """(old, operand) to what is stored, arrays of one number or a packed pair."""
    compute = _OPERATIONS[name]
    if name == "exch" or kind not in PACKED:
        return compute

    def rounded(old, new):
        wide = [decode(one, kind).astype(np.float64) for one in (old, new)]
        return encode(compute(*wide), kind).view(old.dtype)

    return rounded


@instruction("atom", "red")
def _atomic(translation: Translation) -> Step:
    kind, returns = translation.kind, translation.parts[0] == "atom"
    name = translation.one_of((*_OPERATIONS, "cas"))
    order = _ORDERS[translation.one_of(_ORDERS, default="relaxed")]
    spaces = ("global", "shared", "shared::cta")
    translation.expect(*spaces, name, "noftz", *_ORDERS, *_SCOPES)
    space = translation.one_of(spaces).removesuffix("::cta")
    if is_float(kind) and name not in ("add", "exch"):
        raise Unsupported(f".{name} of .{kind}")
    target, place, *operands = translation.operands if returns else ("_", *translation.operands)
    if len(operands) != 1 + (name == "cas"):
        raise Unsupported(f"{len(operands)} operands of .{name}")
    dtype = DTYPES[PACKED.get(kind, kind)]
    write, address = translation.write(target, kind), translation.address(place)
    reads = [translation.read(operand, kind) for operand in operands]
    is_global = space == "global"
    ordering = {"release": is_global and "r" in order, "acquire": is_global and "a" in order}
    compute = None if name == "cas" else _operation(name, kind)

    def atomic(batch, mask):
        places = batch.memory_of(space).atomic(batch, address(batch), mask, dtype, **ordering)
        values = [batch.full(read(batch)) for read in reads]
        before = np.zeros(batch.num_threads, dtype)
        for thread, held in places.items():
            before[thread] = held[0]
            given = [value[thread : thread + 1] for value in values]
            if compute is not None:
                held[:] = compute(held, given[0])
            elif held[0] == given[0][0]:
                held[:] = given[1]
        write(batch, mask, before)

    return atomic
