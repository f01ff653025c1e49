"""Arrays whose references compiled code does not count."""

from __future__ import annotations

import numba
import numba.extending


@numba.extending.intrinsic
def _as_pointer(_typing_context, _address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(numba.types.voidptr))

    return numba.types.voidptr(numba.types.intp), generate


@numba.njit(inline="always")
def borrowed(array):
    """The array without an owner, for compiled functions whose caller keeps it.

    Numba counts the references of an array at each access of a record in it, by atomic
    instructions that take up to two thirds of the time.
    """
    return numba.carray(_as_pointer(array.ctypes.data), array.shape, array.dtype)
