"""The records of all ops, and a case of each: inputs, reference results, bytes and operations.

Experiments and tests that run an op on random inputs take them from here. To add an op, add its
record to a file of `kernels/testing/ops`.

    case = make_case("paged_decode_attention", context_lens=(75, 33), features=("window",))
    case.judge()            # accuracy of every result against fp64, by name

Inputs are hostile: see `kernels.testing.inputs`. On the meta device they have shapes and no values,
which is enough to compile the launches of a call.
"""

from typing import Any

from kernels.testing.op import Case, Op, Sizes
from kernels.testing.ops import attention, mla, moves, stores, tokens

OPS: dict[str, Op] = stores.OPS | tokens.OPS | moves.OPS | attention.OPS | mla.OPS
"""The record of each op by its name."""


def make_case(op: str, **sizes: Any) -> Case:
    """The case of an op; sizes: fields of `Sizes`."""
    return OPS[op].case(Sizes(**sizes))
