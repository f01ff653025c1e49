"""Argument checks shared by all ops.

Every check reads host-side metadata only. Values are looked at only where they already lie in host
memory (CPU tensors, which the interpreter runs on), so no check ever synchronises with a GPU.
All raise before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from operator import index

import numpy as np
import torch
from torch import Tensor

from kernels.primitives import INTERPRETED

MAX_GRID_YZ = 65535
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_DTYPE = torch.float8_e4m3fn
KV_DTYPES = (*FLOAT_DTYPES, FP8_DTYPE)
Scale = torch.Tensor | float | None
"""Scale of K or V in an fp8 cache: a number, an fp32 tensor of one or of num_kv_heads elements, or
None for 1."""
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
_CACHE_DIMS = dict.fromkeys(("num_blocks", "block_size", "num_kv_heads", "head_dim"))
_ROTARY_DIMS = dict.fromkeys(("num_positions", "rotary_dim / 2"))
_SLOT_DIMS = {"num_slots": None}
_INT32 = (torch.int32,)
_INTEGERS = (torch.int32, torch.int64)


def _listed(items) -> str:
    return " or ".join(str(item) for item in items)


def not_a_tensor(name: str, value: object) -> TypeError:
    """The error of an argument that should be a tensor."""
    return TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: dict[str, int | None],
    *,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
    any_strides: bool = False,
) -> None:
    """Check one tensor argument.

    shape: expected size of each dimension by its name, None for any size.
    device: the device of the other arguments; None for the first one, which decides it.
    any_strides: whether the last dimension may be strided too.

    Raises:
        TypeError: not a tensor.
        ValueError: wrong shape, dtype or device, last dimension not contiguous, or a CPU tensor
            outside the interpreter.
    """
    if not isinstance(tensor, Tensor):
        raise not_a_tensor(name, tensor)
    actual = tensor.shape
    fits = len(actual) == len(shape)
    if fits:
        for dim, size in enumerate(shape.values()):
            if size is not None and size != actual[dim]:
                fits = False
                break
    if not fits:
        wanted = ", ".join(dim if size is None else f"{dim}={size}" for dim, size in shape.items())
        raise ValueError(f"{name}: expected shape ({wanted}), got {tuple(actual)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected dtype {_listed(dtypes)}, got {tensor.dtype}")
    if device is None:
        if tensor.is_cpu and not INTERPRETED.value:
            raise ValueError(
                f"{name}: got a CPU tensor, but the kernels were compiled for a GPU; pass a GPU "
                "tensor, or set TRITON_INTERPRET=1 in the environment before importing kernels to "
                "run them on CPU tensors in Triton's interpreter"
            )
    elif tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")
    if not any_strides and tensor.stride()[-1] != 1 and actual[-1] > 1:
        raise ValueError(
            f"{name}: expected a contiguous last dimension, got strides {tensor.stride()}"
        )


def as_integer(name: str, value: object) -> int:
    """An integer argument as an int; one of NumPy, or a tensor of one element, serves too.

    Raises:
        TypeError: not an integer.
    """
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}") from None


def check_integer(name: str, value: int) -> None:
    """Check that an argument is an int, which alone Triton takes for an integer."""
    if type(value) is not int:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")


def check_number(name: str, value: float) -> None:
    """Check that an argument is a float or an int."""
    if not isinstance(value, (float, int)):
        raise TypeError(f"{name}: expected a float or an int, got {type(value).__name__}")


def check_norm(eps_name: str, eps: float, offset_name: str, offset: float) -> None:
    """Check the constants of an RMSNorm by the names that they have: eps is at least 0."""
    check_number(eps_name, eps)
    check_number(offset_name, offset)
    if not 0 <= eps < math.inf:
        raise ValueError(f"{eps_name}: expected 0 or a positive finite number, got {eps}")


def check_like(name: str, tensor: torch.Tensor, other: torch.Tensor, dims: Sequence[str]) -> None:
    """Check that a tensor has shape, dtype and device of another one; dims: what these have."""
    if (
        isinstance(tensor, Tensor)
        and tensor.shape == other.shape
        and tensor.dtype == other.dtype
        and tensor.device == other.device
        and tensor.stride()[-1] == 1
    ):
        return
    shape = dict(zip(dims, other.shape, strict=True))
    check_tensor(name, tensor, shape, dtypes=(other.dtype,), device=other.device)


def check_writable(name: str, tensor: torch.Tensor) -> None:
    """Check that elements of a tensor that is written to do not share memory, as expanded ones do.

    Several programs would write to one place, and a rotation in place be applied several times.
    """
    strides = tensor.stride()
    if 0 in strides and any(n > 1 for n, s in zip(tensor.shape, strides, strict=True) if s == 0):
        raise ValueError(
            f"{name}: expected memory of its own for every element to be written, got an expanded "
            f"tensor of shape {tuple(tensor.shape)} and strides {strides}"
        )


def check_disjoint(names: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Check that two tensors have no element in common, as far as that is quick to see."""
    if a.device != b.device or a.is_meta or not _share_memory(a, b):
        return
    raise ValueError(f"{names}: expected tensors that do not overlap in memory, got two that do")


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    (first_a, end_a), (first_b, end_b) = _address_range(a), _address_range(b)
    if end_a <= first_b or end_b <= first_a:
        return False
    try:  # numpy solves it for shapes and strides, and reads nothing
        return np.shares_memory(_Bytes(a), _Bytes(b), max_work=100_000)
    except np.exceptions.TooHardError:
        return False


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    first = tensor.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.itemsize


class _Bytes:
    """The bytes of a tensor as an array, wherever they are."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.itemsize
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), True),
            "shape": (*tensor.shape, size),
            "strides": (*(size * stride for stride in tensor.stride()), 1),
            "typestr": "|u1",
            "version": 3,
        }


def check_kv_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES,
    device: torch.device | None = None,
    written: bool = False,
) -> None:
    """Check a paged cache: both (num_blocks, block_size, num_kv_heads, head_dim), of one dtype.

    written: whether the op writes to it.
    """
    check_tensor("k_cache", k_cache, _CACHE_DIMS, dtypes=dtypes, device=device)
    check_like("v_cache", v_cache, k_cache, _CACHE_DIMS)
    if written:
        check_writable("k_cache", k_cache)
        check_writable("v_cache", v_cache)
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    if not (block_size and num_kv_heads and head_dim):
        raise ValueError(
            "k_cache: expected block_size, num_kv_heads and head_dim of at least 1, got shape "
            f"{tuple(k_cache.shape)}"
        )


def dtypes_beside(k_cache: torch.Tensor) -> tuple[torch.dtype, ...]:
    """Dtypes that queries and new keys may have: the cache's own, any with an fp8 cache."""
    return FLOAT_DTYPES if k_cache.dtype == FP8_DTYPE else (k_cache.dtype,)


def check_cache_scales(k_scale: Scale, v_scale: Scale, k_cache: torch.Tensor) -> None:
    """Check the scales of an fp8 cache: numbers, or fp32 tensors of one or num_kv_heads elements.

    Raises:
        TypeError: neither a number nor a tensor.
        ValueError: a scale with a cache that is not fp8; one that is not positive and finite (a
            tensor's only where it lies in host memory); another shape, dtype or device.
    """
    if k_scale is None and v_scale is None:
        return
    num_kv_heads = k_cache.shape[2]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if k_cache.dtype != FP8_DTYPE:
            raise ValueError(
                f"{name}: expected None, as only {FP8_DTYPE} caches have scales, but the cache is "
                f"{k_cache.dtype}"
            )
        if isinstance(scale, torch.Tensor):
            if scale.shape not in ((), (1,), (num_kv_heads,)):
                raise ValueError(
                    f"{name}: expected shape (), (1) or (num_kv_heads={num_kv_heads}), "
                    f"got {tuple(scale.shape)}"
                )
            dims = dict.fromkeys(range(scale.dim()))
            check_tensor(
                name,
                scale,
                dims,
                dtypes=(torch.float32,),
                device=k_cache.device,
                any_strides=not dims,
            )
            if scale.device.type == "cpu" and not ((scale > 0) & scale.isfinite()).all():
                raise ValueError(f"{name}: expected positive finite scales, got {scale.tolist()}")
        elif not isinstance(scale, Real):
            raise TypeError(
                f"{name}: expected a number, a torch.Tensor or None, got {type(scale).__name__}"
            )
        elif not 0 < scale < math.inf:
            raise ValueError(f"{name}: expected a positive finite number, got {scale}")


def check_heads(q: torch.Tensor, k_cache: torch.Tensor) -> None:
    """Check the head dimension and that the query heads divide evenly among the KV heads (GQA)."""
    shape = q.shape
    num_q_heads, head_dim = shape[-2], shape[-1]
    num_kv_heads = k_cache.shape[2]
    if num_q_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"q: expected a positive multiple of num_kv_heads={num_kv_heads} as num_q_heads, "
            f"got {num_q_heads}"
        )
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"q: expected a head_dim from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {head_dim}"
        )


def check_slots(slot_mapping: torch.Tensor, k_cache: torch.Tensor, *, num_tokens: int) -> None:
    """Check a slot mapping of at most num_tokens slots, host-resident values too."""
    device = k_cache.device
    check_tensor("slot_mapping", slot_mapping, _SLOT_DIMS, dtypes=_INTEGERS, device=device)
    num_slots = slot_mapping.shape[0]
    if num_slots > num_tokens:
        raise ValueError(
            f"slot_mapping: expected at most num_tokens={num_tokens} slots, got {num_slots}"
        )
    if num_slots and slot_mapping.is_cpu:
        capacity = k_cache.shape[0] * k_cache.shape[1]
        largest = int(slot_mapping.max())
        if largest >= capacity:
            raise ValueError(
                f"slot_mapping: expected slots below {capacity} "
                f"(num_blocks * block_size), got {largest}"
            )


def check_cu_seqlens(
    name: str,
    cu_seqlens: torch.Tensor,
    *,
    batch: int,
    total: int,
    max_seqlen: int,
    device: torch.device,
) -> None:
    """Check cumulative lengths, (batch + 1,) int32 from 0 to at most `total`, and their maximum.

    Errors in max_seqlen are reported as of the argument max_seqlen_<suffix of name>.
    """
    check_tensor(name, cu_seqlens, {"batch + 1": batch + 1}, dtypes=_INT32, device=device)
    max_name = name.replace("cu_seqlens", "max_seqlen")
    check_integer(max_name, max_seqlen)
    if max_seqlen < 0:
        raise ValueError(f"{max_name}: expected at least 0, got {max_seqlen}")
    if not cu_seqlens.is_cpu:
        return
    lengths = cu_seqlens.diff()
    if cu_seqlens[0] != 0 or (lengths < 0).any() or cu_seqlens[-1] > total:
        raise ValueError(
            f"{name}: expected values that ascend from 0 to at most {total}, "
            f"got {cu_seqlens.tolist()}"
        )
    if batch and int(lengths.max()) > max_seqlen:
        raise ValueError(
            f"{max_name}: expected at least {int(lengths.max())}, the longest of {name}, "
            f"got {max_seqlen}"
        )


def check_block_tables(
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    k_cache: torch.Tensor,
    *,
    batch: int,
    query_lens: torch.Tensor | int = 1,
    window_size: torch.Tensor | int | None = None,
    names: tuple[str, str, str] = ("block_tables", "context_lens", "batch"),
) -> None:
    """Check block tables against context lengths, their values too where they lie on the host.

    query_lens, window_size: queries at the end of each sequence and tokens that each sees, (batch,)
    or one number for all. Table entries wholly before the window of the first query are never read
    and may hold anything.
    names: what the caller calls the tables, the lengths and their number.
    """
    tables_name, lens_name, batch_name = names
    device = k_cache.device
    shape = {batch_name: batch, "max_blocks": None}
    check_tensor(tables_name, block_tables, shape, dtypes=_INT32, device=device)
    check_tensor(lens_name, context_lens, {batch_name: batch}, dtypes=_INT32, device=device)
    if not context_lens.is_cpu or batch == 0:
        return
    num_blocks, block_size = k_cache.shape[:2]
    max_blocks = block_tables.shape[1]
    if int(context_lens.min()) < 0:
        raise ValueError(f"{lens_name}: expected lengths >= 0, got {int(context_lens.min())}")
    longest = int(context_lens.max())
    if longest > max_blocks * block_size:
        raise ValueError(
            f"{tables_name}: {max_blocks} columns of block_size {block_size} hold "
            f"{max_blocks * block_size} tokens, but {lens_name} reaches {longest}; "
            f"needed are {-(-longest // block_size)} columns"
        )
    column = torch.arange(max_blocks)
    visible = column < ((context_lens + block_size - 1) // block_size)[:, None]
    if isinstance(query_lens, torch.Tensor):
        visible &= (query_lens > 0)[:, None]
    if window_size is not None:
        first_visible = context_lens - query_lens - window_size + 1
        visible &= (column + 1) * block_size > first_visible[:, None]
    invalid = visible & ((block_tables < 0) | (block_tables >= num_blocks))
    if invalid.any():
        row, col = invalid.nonzero()[0].tolist()
        raise ValueError(
            f"{tables_name}: expected block ids from 0 to {num_blocks - 1} within the context, got "
            f"{int(block_tables[row, col])} at [{row}, {col}]"
        )


def check_rotary(
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_tokens: int,
    head_dim: int,
    device: torch.device,
) -> None:
    """Check rotary tables (num_positions, rotary_dim / 2) and the positions that index them."""
    shape = {"num_tokens": num_tokens}
    check_tensor("positions", positions, shape, dtypes=_INTEGERS, device=device)
    check_tensor("cos", cos, _ROTARY_DIMS, dtypes=FLOAT_DTYPES, device=device)
    check_like("sin", sin, cos, _ROTARY_DIMS)
    if not 2 <= 2 * cos.shape[1] <= head_dim:
        raise ValueError(
            f"cos: expected a rotary_dim from 2 to head_dim={head_dim}, got {2 * cos.shape[1]}"
        )
    if num_tokens and positions.is_cpu:
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= cos.shape[0]:
            raise ValueError(
                f"positions: expected rows of cos from 0 to {cos.shape[0] - 1}, "
                f"got {low if low < 0 else high}"
            )


def check_score_options(
    q: torch.Tensor,
    window_size: int | None,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    *,
    batch: int,
) -> None:
    """Check what makes the scores of q, (..., num_q_heads, head_dim), of `batch` sequences."""
    if scale is not None:
        check_number("scale", scale)
    if window_size is not None:
        check_integer("window_size", window_size)
        if window_size < 1:
            raise ValueError(
                f"window_size: expected None (no window) or at least 1 token, got {window_size}"
            )
    check_number("softcap", softcap)
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap: expected 0 (off) or a positive finite cap, got {softcap}")
    if alibi_slopes is not None:
        shape = {"num_q_heads": q.shape[-2]}
        if isinstance(alibi_slopes, torch.Tensor) and alibi_slopes.dim() == 2:
            shape = {"batch": batch, **shape}
        check_tensor("alibi_slopes", alibi_slopes, shape, dtypes=(torch.float32,), device=q.device)
    if sinks is not None:
        shape = {"num_q_heads": q.shape[-2]}
        check_tensor("sinks", sinks, shape, dtypes=FLOAT_DTYPES, device=q.device)


def check_grid_dim(name: str, dim: str | None, size: int) -> None:
    """Check a size that becomes a secondary launch dimension, which CUDA limits to 65535."""
    check_integer(name, size)
    if not 1 <= size <= MAX_GRID_YZ and not (dim and size == 0):
        what = f"{dim} " if dim else ""
        raise ValueError(f"{name}: expected {what}from 1 to {MAX_GRID_YZ}, got {size}")


def check_queries(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: Scale,
    v_scale: Scale,
    *,
    rows: str,
) -> None:
    """Check the queries of an attention op, (rows, num_q_heads, head_dim), its cache and scales."""
    check_kv_cache(k_cache, v_cache, dtypes=KV_DTYPES)
    check_cache_scales(k_scale, v_scale, k_cache)
    dims = {rows: None, "num_q_heads": None, "head_dim": k_cache.shape[3]}
    check_tensor("q", q, dims, dtypes=dtypes_beside(k_cache), device=k_cache.device)
    check_heads(q, k_cache)


def check_out(out: torch.Tensor, q: torch.Tensor, *, rows: str = "batch") -> None:
    """Check a caller's output buffer: the shape and device of q, in q's dtype or fp32."""
    dims = (rows, "num_q_heads", "head_dim")
    if getattr(out, "dtype", None) == q.dtype:
        check_like("out", out, q, dims)
    else:
        shape = dict(zip(dims, q.shape, strict=True))
        dtypes = tuple(dict.fromkeys((q.dtype, torch.float32)))
        check_tensor("out", out, shape, dtypes=dtypes, device=q.device)
    check_writable("out", out)


def results_of(
    q: torch.Tensor, out: torch.Tensor | None, return_lse: bool, *, rows: str = "batch"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What an attention op writes its output and LSE to: `out` if given, checked, or a new one."""
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    else:
        check_out(out, q, rows=rows)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
