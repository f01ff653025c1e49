"""Argument checks shared by all ops.

An op declares its tensors once, and each call checks the tensors it was given:

    _TENSORS = TensorSpec(
        Arg("q", "batch num_q_heads head_dim", FLOAT_DTYPES),
        Arg("context_lens", "batch", INT32),
    )
    sizes = _TENSORS(q, context_lens)  # sizes.batch, sizes.head_dim ...

The first argument that has a dimension of some name decides its size; later arguments must agree.

A spec sees shapes, strides, dtypes and devices only, and remembers which combinations have passed.
Values are checked only where they already lie in host memory (CPU tensors, which the interpreter
runs on). So no check synchronises with a GPU. All checks raise before anything is written.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from numbers import Real
from types import SimpleNamespace

import torch

from kernels.primitives import INTERPRETED

MAX_GRID_YZ = 65535
"""CUDA's limit of the second and third launch dimension."""
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_DTYPE = torch.float8_e4m3fn
KV_DTYPES = (*FLOAT_DTYPES, FP8_DTYPE)
FP32 = (torch.float32,)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
INTEGERS = (torch.int32, torch.int64)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
Scale = torch.Tensor | float | None
"""Scale of K or V in an fp8 cache: a number, an fp32 tensor of one or of num_kv_heads elements, or
None for 1."""
Dtypes = tuple[torch.dtype, ...]
Rule = Callable[[SimpleNamespace], None]


@dataclass(frozen=True)
class Arg:
    """Declaration of one tensor argument."""

    name: str
    dims: str
    """Names of the dimensions; "|" separates alternatives. A number is a fixed size, "batch+1" is
    one more than batch, "rotary_dim/2" half of rotary_dim."""
    dtypes: Dtypes | Callable[[dict[str, torch.dtype]], Dtypes]
    """Dtypes allowed, or a function that returns them given the dtype of each argument by name."""
    optional: bool = False
    """Whether None is allowed."""
    written: bool = False
    """Whether the op writes to it: no two elements may share memory, as expanded ones do. Programs
    would race for one place, and a rotation in place would be applied several times."""
    any_strides: bool = False
    """Whether the last dimension may be strided."""
    host_too: bool = False
    """Whether it may lie in host memory although other arguments do not."""


class TensorSpec:
    """Declaration of all tensor arguments of an op.

    rules: functions of the sizes that raise ValueError where these do not fit together.
    """

    def __init__(self, *args: Arg, rules: tuple[Rule, ...] = ()):
        self._args = args
        self._rules = rules
        self._sizes = functools.lru_cache(maxsize=1024)(self._check)

    def __call__(
        self, *tensors: torch.Tensor | None, device: torch.device | None = None
    ) -> SimpleNamespace:
        """Check the tensors, given in the order of the declaration.

        device: the device they must be on; None for the first one's.

        Returns:
            The size of every dimension by its name.

        Raises:
            TypeError: not a tensor.
            ValueError: wrong shape, dtype or device, last dimension not contiguous, memory shared
                by elements to be written, or a CPU tensor outside the interpreter.
        """
        try:
            layouts = [
                None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors
            ]
        except (AttributeError, TypeError):  # TypeError: stride is no method of NumPy-like arrays
            for arg, tensor in zip(self._args, tensors, strict=True):
                if tensor is not None and not isinstance(tensor, torch.Tensor):
                    raise not_a_tensor(arg.name, tensor) from None
            raise
        return self._sizes(device, *layouts)

    def _check(self, device: torch.device | None, *layouts: tuple | None) -> SimpleNamespace:
        sizes: dict[str, int] = {}
        given = dict(zip(self._args, layouts, strict=True))
        dtypes = {arg.name: layout[2] for arg, layout in given.items() if layout is not None}
        for arg, layout in given.items():
            if layout is None:
                if not arg.optional:
                    raise not_a_tensor(arg.name, None)
                continue
            shape, strides, dtype, actual_device = layout
            _bind_shape(arg, tuple(shape), sizes)
            allowed = arg.dtypes(dtypes) if callable(arg.dtypes) else arg.dtypes
            if dtype not in allowed:
                raise ValueError(f"{arg.name}: expected dtype {_either(allowed)}, got {dtype}")
            if device is None:
                device = actual_device
                if device.type == "cpu" and not INTERPRETED.value:
                    raise ValueError(
                        f"{arg.name}: got a CPU tensor, but the kernels were compiled for a GPU; "
                        "pass a GPU tensor, or set TRITON_INTERPRET=1 in the environment before "
                        "importing kernels to run them on CPU tensors in Triton's interpreter"
                    )
            elif actual_device != device and not (arg.host_too and actual_device.type == "cpu"):
                raise ValueError(
                    f"{arg.name}: expected a tensor on {device}, got one on {actual_device}"
                )
            if shape and strides[-1] != 1 and shape[-1] > 1 and not arg.any_strides:
                raise ValueError(
                    f"{arg.name}: expected a contiguous last dimension, got strides {strides}"
                )
            if arg.written:
                check_writable(arg.name, shape, strides)
        bound = SimpleNamespace(**sizes)
        for rule in self._rules:
            rule(bound)
        return bound


def _either(items) -> str:
    return " or ".join(map(str, items))


def _base(dim: str) -> str:
    """The name in "batch+1" or "rotary_dim/2"."""
    return dim.removesuffix("+1").removesuffix("/2")


def _size(dim: str, sizes: dict[str, int]) -> int | None:
    """Size that a dimension must have, None for any."""
    if dim.isdigit():
        return int(dim)
    size = sizes.get(_base(dim))
    return size if size is None else {"+1": size + 1, "/2": size // 2}.get(dim[-2:], size)


def _fits(dim: str, actual: int, sizes: dict[str, int]) -> bool:
    size = _size(dim, sizes)
    return actual >= dim.endswith("+1") if size is None else actual == size


def _bind_shape(arg: Arg, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    """Add the sizes of the first alternative that a shape fits."""
    alternatives = [dims.split() for dims in arg.dims.split("|")]
    for dims in alternatives:
        if len(dims) == len(shape) and all(map(_fits, dims, shape, repeat(sizes))):
            for dim, actual in zip(dims, shape, strict=True):
                derived = {"+1": actual - 1, "/2": 2 * actual}
                sizes[_base(dim)] = derived.get(dim[-2:], actual)
            return

    def wanted(dims: list[str]) -> str:
        known = [(dim, _size(dim, sizes)) for dim in dims]
        return ", ".join(
            dim if size is None or dim.isdigit() else f"{dim}={size}" for dim, size in known
        )

    shapes = _either(f"({wanted(dims)})" for dims in alternatives)
    raise ValueError(f"{arg.name}: expected shape {shapes}, got {shape}")


def not_a_tensor(name: str, value: object) -> TypeError:
    """The error of an argument that should be a tensor."""
    return TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def same_dtype(name: str) -> Callable[[dict[str, torch.dtype]], Dtypes]:
    """For `Arg.dtypes`: the dtype of another argument."""
    return lambda dtypes: (dtypes[name],)


def beside_cache(dtypes: dict[str, torch.dtype]) -> Dtypes:
    """For `Arg.dtypes`, of queries and new keys: the cache's own dtype, any with an fp8 cache."""
    return FLOAT_DTYPES if dtypes["k_cache"] == FP8_DTYPE else (dtypes["k_cache"],)


def kv_cache_args(dtypes: Dtypes = KV_DTYPES, *, written: bool = False) -> tuple[Arg, Arg]:
    """Declare k_cache and v_cache of one dtype. Needs the rule `check_cache_dims`."""
    dims = "num_blocks block_size num_kv_heads head_dim"
    return (
        Arg("k_cache", dims, dtypes, written=written),
        Arg("v_cache", dims, same_dtype("k_cache"), written=written),
    )


SCALE_ARGS = tuple(
    Arg(name, "| 1 | num_kv_heads", FP32, optional=True) for name in ("k_scale", "v_scale")
)
"""Scales that are tensors; see `check_scales`."""
ROTARY_ARGS = (
    Arg("positions", "num_tokens", INTEGERS),
    Arg("cos", "num_positions rotary_dim/2", FLOAT_DTYPES),
    Arg("sin", "num_positions rotary_dim/2", same_dtype("cos")),
)
"""Need the rule `check_rotary_dim`."""
ALIBI_ARG = Arg("alibi_slopes", "num_q_heads | batch num_q_heads", FP32, optional=True)


def attention_spec(rows: str, *args: Arg, rules: tuple[Rule, ...] = ()) -> TensorSpec:
    """Declare k_cache, v_cache, k_scale, v_scale, q and out of an attention op, then `args`, then
    alibi_slopes and sinks.

    rows: name of the first dimension of q, (rows, num_q_heads, head_dim).
    """
    q_dims = f"{rows} num_q_heads head_dim"
    return TensorSpec(
        *kv_cache_args(),
        *SCALE_ARGS,
        Arg("q", q_dims, beside_cache),
        Arg("out", q_dims, lambda dtypes: (dtypes["q"], *FP32), optional=True, written=True),
        *args,
        ALIBI_ARG,
        Arg("sinks", "num_q_heads", FLOAT_DTYPES, optional=True),
        rules=(check_cache_dims, check_heads, *rules),
    )


def store_spec(*args: Arg, rules: tuple[Rule, ...] = ()) -> TensorSpec:
    """Declare k_cache, v_cache, k_scale, v_scale, key, value and slot_mapping of an op that stores
    keys and values, then `args`."""
    rows = "num_tokens num_kv_heads head_dim"
    return TensorSpec(
        *kv_cache_args(written=True),
        *SCALE_ARGS,
        Arg("key", rows, beside_cache),
        Arg("value", rows, same_dtype("key")),
        Arg("slot_mapping", "num_slots", INTEGERS),
        *args,
        rules=(check_cache_dims, _check_num_slots, *rules),
    )


def tensor_or_none(scale: Scale) -> torch.Tensor | None:
    """A scale as a TensorSpec takes it."""
    return scale if isinstance(scale, torch.Tensor) else None


def check_cache_dims(sizes: SimpleNamespace, name: str = "k_cache") -> None:
    """Rule: no dimension of a cache but num_blocks is 0. name: the argument with the keys."""
    for dim in ("block_size", "num_kv_heads", "head_dim"):
        if vars(sizes).get(dim) == 0:
            raise ValueError(f"{name}: expected a {dim} of at least 1, got 0")


def check_heads(sizes: SimpleNamespace) -> None:
    """Rule: supported head_dim, and query heads that divide evenly among the KV heads (GQA)."""
    if sizes.num_q_heads == 0 or sizes.num_q_heads % sizes.num_kv_heads:
        raise ValueError(
            f"q: expected a positive multiple of num_kv_heads={sizes.num_kv_heads} as num_q_heads, "
            f"got {sizes.num_q_heads}"
        )
    if not MIN_HEAD_DIM <= sizes.head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"q: expected a head_dim from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {sizes.head_dim}"
        )


def check_batch(sizes: SimpleNamespace) -> None:
    """Rule: a batch of queries that one launch can hold."""
    check_grid_dim("q", "batch", sizes.batch)


def _check_num_slots(sizes: SimpleNamespace) -> None:
    if sizes.num_slots > sizes.num_tokens:
        raise ValueError(
            f"slot_mapping: expected at most num_tokens={sizes.num_tokens} slots, "
            f"got {sizes.num_slots}"
        )


def check_rotary_dim(sizes: SimpleNamespace, name: str = "cos") -> None:
    """Rule: rotary tables that fit the heads. name: the argument that has the cosines."""
    if not 2 <= sizes.rotary_dim <= sizes.head_dim:
        raise ValueError(
            f"{name}: expected a rotary_dim from 2 to head_dim={sizes.head_dim}, "
            f"got {sizes.rotary_dim}"
        )


def check_grid_dim(name: str, dim: str | None, size: int) -> None:
    """Check a size that becomes a secondary launch dimension; a tensor's dimension may be 0."""
    check_integer(name, size)
    if not 1 <= size <= MAX_GRID_YZ and not (dim and size == 0):
        what = f"{dim} " if dim else ""
        raise ValueError(f"{name}: expected {what}from 1 to {MAX_GRID_YZ}, got {size}")


def check_writable(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Check that the elements of a tensor of these sizes and strides do not share memory."""
    if any(n > 1 and stride == 0 for n, stride in zip(shape, strides, strict=True)):
        raise ValueError(
            f"{name}: expected memory of its own for every element to be written, got an expanded "
            f"tensor of shape {tuple(shape)} and strides {strides}"
        )


def check_integer(name: str, value: int) -> None:
    """Check that an argument is an int: Triton takes no other type for an integer."""
    if type(value) is not int:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")


def check_number(name: str, value: float) -> None:
    """Check that an argument is a float or an int."""
    if not isinstance(value, (float, int)):
        raise TypeError(f"{name}: expected a float or an int, got {type(value).__name__}")


def check_norm(eps_name: str, eps: float, offset_name: str, offset: float) -> None:
    """Check the constants of an RMSNorm, by the names that the caller gives them."""
    check_number(eps_name, eps)
    check_number(offset_name, offset)
    if not 0 <= eps < math.inf:
        raise ValueError(f"{eps_name}: expected 0 or a positive finite number, got {eps}")


def check_score_options(
    scale: float | None, window_size: int | None, softcap: float, num_splits: int | None = None
) -> None:
    """Check the numbers that an attention op takes."""
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
    if num_splits is not None:
        check_grid_dim("num_splits", None, num_splits)


def check_scales(k_scale: Scale, v_scale: Scale, k_cache: torch.Tensor) -> None:
    """Check the scales of an fp8 cache beyond what a TensorSpec checks.

    Raises:
        TypeError: neither a number nor a tensor.
        ValueError: a scale with a cache that is not fp8; one that is not positive and finite (a
            tensor's only where it lies in host memory).
    """
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if k_cache.dtype != FP8_DTYPE:
            raise ValueError(
                f"{name}: expected None, as only {FP8_DTYPE} caches have scales, but the cache is "
                f"{k_cache.dtype}"
            )
        if isinstance(scale, torch.Tensor):
            if scale.is_cpu and not ((scale > 0) & scale.isfinite()).all():
                raise ValueError(f"{name}: expected positive finite scales, got {scale.tolist()}")
        elif not isinstance(scale, Real):
            raise TypeError(
                f"{name}: expected a number, a torch.Tensor or None, got {type(scale).__name__}"
            )
        elif not 0 < scale < math.inf:
            raise ValueError(f"{name}: expected a positive finite number, got {scale}")


def check_slots(slot_mapping: torch.Tensor, k_cache: torch.Tensor) -> None:
    """Check the values of a slot mapping in host memory."""
    if slot_mapping.is_cpu and slot_mapping.numel():
        capacity = k_cache.shape[0] * k_cache.shape[1]
        largest = int(slot_mapping.max())
        if largest >= capacity:
            raise ValueError(
                f"slot_mapping: expected slots below {capacity} "
                f"(num_blocks * block_size), got {largest}"
            )


def check_positions(positions: torch.Tensor, num_positions: int) -> None:
    """Check the values of rotary positions in host memory."""
    if positions.is_cpu and positions.numel():
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= num_positions:
            raise ValueError(
                f"positions: expected rows of cos from 0 to {num_positions - 1}, "
                f"got {low if low < 0 else high}"
            )


def check_cu_seqlens(name: str, cu_seqlens: torch.Tensor, *, total: int, max_seqlen: int) -> None:
    """Check max_seqlen and, in host memory, cumulative lengths that end at `total` or before.

    Errors in max_seqlen name the argument max_seqlen_<suffix of name>.
    """
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
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest > max_seqlen:
        raise ValueError(
            f"{max_name}: expected at least {longest}, the longest of {name}, got {max_seqlen}"
        )


def check_block_tables(
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    k_cache: torch.Tensor,
    *,
    query_lens: torch.Tensor | int = 1,
    window_size: torch.Tensor | int | None = None,
    names: tuple[str, str] = ("block_tables", "context_lens"),
) -> None:
    """Check block tables and context lengths in host memory.

    query_lens, window_size: queries at the end of each sequence and tokens that each sees, (batch,)
    or one number for all. Table entries wholly before the window of the first query are never read
    and may hold anything.
    names: what the caller calls the tables and the lengths.
    """
    if not context_lens.is_cpu or context_lens.shape[0] == 0:
        return
    tables_name, lens_name = names
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
        visible = visible & (query_lens > 0)[:, None]
    if window_size is not None:
        first_visible = context_lens - query_lens - window_size + 1
        visible = visible & ((column + 1) * block_size > first_visible[:, None])
    invalid = visible & ((block_tables < 0) | (block_tables >= num_blocks))
    if invalid.any():
        row, col = invalid.nonzero()[0].tolist()
        raise ValueError(
            f"{tables_name}: expected block ids from 0 to {num_blocks - 1} within the context, got "
            f"{int(block_tables[row, col])} at [{row}, {col}]"
        )
