"""Argument checks shared by all ops.

An op declares its tensors once. Each call of the op checks the tensors that it was given:

    _TENSORS = TensorSpec(
        Arg("q", "batch num_q_heads head_dim", FLOAT_DTYPES),
        Arg("context_lens", "batch", INT32),
    )
    sizes = _TENSORS(q, context_lens)  # sizes.batch, sizes.head_dim ...

The first argument with a dimension sets its size; later arguments must have the same size.

A spec checks shapes, strides, dtypes and devices only, and caches the combinations that passed.
Values are checked only if they are in host memory (CPU tensors, for example in the interpreter). So
no check synchronises with a GPU. All checks raise before anything is written.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from types import SimpleNamespace

import torch

from kernels.primitives import INTERPRETED

MAX_GRID_YZ = 65535
"""CUDA's maximum size of the second and third dimension of a launch grid."""
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_DTYPE = torch.float8_e4m3fn
KV_DTYPES = (*FLOAT_DTYPES, FP8_DTYPE)
FP32 = (torch.float32,)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
INTEGERS = (torch.int32, torch.int64)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
MIN_FP32, MAX_FP32 = 2.0**-149, (2 - 2**-23) * 2.0**127
"""Smallest and largest positive number in fp32, the dtype of float arguments of kernels."""
Scale = torch.Tensor | float | None
"""Scale of K or V in an fp8 cache: a number, an fp32 tensor with one or num_kv_heads elements, or
None for a scale of 1."""
Dtypes = tuple[torch.dtype, ...]
Rule = Callable[[SimpleNamespace], None]


@dataclass(frozen=True)
class Arg:
    """Declaration of one tensor argument."""

    name: str
    dims: str
    """Names of the dimensions. "|" separates alternatives. A number is a fixed size, "batch+1"
    means size batch + 1, and "rotary_dim/2" means half of rotary_dim."""
    dtypes: Dtypes | Callable[[dict[str, torch.dtype]], Dtypes]
    """Allowed dtypes, or a function from {argument name: dtype} to the allowed dtypes."""
    optional: bool = False
    """Whether None is allowed."""
    or_number: bool = False
    """Whether a number is allowed. The op itself checks the number."""
    written: bool = False
    """Whether the op writes to the tensor. Then no two elements may share memory (expanded
    tensors): programs would race, and an in-place rotation would be applied several times."""
    any_strides: bool = False
    """Whether the last dimension may be strided."""
    host_too: bool = False
    """Whether the tensor may be on the CPU while other arguments are on the GPU."""


class TensorSpec:
    """Declaration of all tensor arguments of an op.

    rules: functions that get the sizes and raise ValueError if the sizes do not fit together.
    """

    def __init__(self, *args: Arg, rules: tuple[Rule, ...] = ()) -> None:
        self._args = args
        self._rules = rules
        self._sizes = functools.lru_cache(maxsize=1024)(self._check)

    def __call__(
        self, *tensors: torch.Tensor | float | None, device: torch.device | None = None
    ) -> SimpleNamespace:
        """Check the tensors, given in the order of the declaration.

        device: the device that all tensors must be on; by default the first tensor's.

        Returns:
            The size of every dimension by its name.

        Raises:
            TypeError: an argument is not a tensor.
            ValueError: a shape, dtype or device is wrong, a last dimension is not contiguous,
                written elements share memory, or a tensor is on the CPU outside the interpreter.
        """
        layouts: list[tuple | None] = []
        for arg, t in zip(self._args, tensors, strict=True):
            if isinstance(t, torch.Tensor):
                layouts.append((t.shape, t.stride(), t.dtype, t.device))
            elif arg.or_number or (t is None and arg.optional):
                layouts.append(None)
            else:
                raise not_a_tensor(arg.name, t)
        return self._sizes(device, *layouts)

    def _check(self, device: torch.device | None, *layouts: tuple | None) -> SimpleNamespace:
        sizes: dict[str, int] = {}
        given = dict(zip(self._args, layouts, strict=True))
        dtypes = {arg.name: layout[2] for arg, layout in given.items() if layout is not None}
        for arg, layout in given.items():
            if layout is None:
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
            shared = any(n > 1 and stride == 0 for n, stride in zip(shape, strides, strict=True))
            if arg.written and shared:
                raise ValueError(
                    f"{arg.name}: expected memory of its own for every element to be written, got "
                    f"an expanded tensor of shape {tuple(shape)} and strides {strides}"
                )
        bound = SimpleNamespace(**sizes)
        for rule in self._rules:
            rule(bound)
        return bound


def _either(items: Iterable[object]) -> str:
    return " or ".join(map(str, items))


def _named(dim: str, size: int) -> tuple[str, int]:
    """Split off "+1" or "/2": "batch+1" of size 4 gives ("batch", 3). Other names stay."""
    if dim.endswith("+1"):
        return dim[:-2], size - 1
    return (dim[:-2], 2 * size) if dim.endswith("/2") else (dim, size)


def _bind_shape(arg: Arg, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    """Add to `sizes` the dimensions of the first alternative in arg.dims that `shape` fits."""
    alternatives = [dims.split() for dims in arg.dims.split("|")]
    for dims in alternatives:
        bound = dict(map(_named, dims, shape))
        known = {name: int(name) for name in bound if name.isdigit()} | sizes
        fits = all(0 <= size == known.get(name, size) for name, size in bound.items())
        if fits and len(dims) == len(shape):
            sizes.update(bound)
            return

    def wanted(dim: str) -> str:
        size = sizes.get(_named(dim, 0)[0])
        if size is None or dim.isdigit():
            return dim
        derived = {"+1": size + 1, "/2": size // 2}
        return f"{dim}={derived.get(dim[-2:], size)}"

    shapes = _either(f"({', '.join(map(wanted, dims))})" for dims in alternatives)
    raise ValueError(f"{arg.name}: expected shape {shapes}, got {shape}")


def not_a_tensor(name: str, value: object) -> TypeError:
    """Return the error to raise if an argument should be a tensor but is `value`."""
    return TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def same_dtype(name: str) -> Callable[[dict[str, torch.dtype]], Dtypes]:
    """For `Arg.dtypes`: allow only the dtype of argument `name`."""
    return lambda dtypes: (dtypes[name],)


def query_dtypes(dtypes: dict[str, torch.dtype]) -> Dtypes:
    """For `Arg.dtypes` of queries and new keys: the cache's dtype, or any if the cache is fp8."""
    return FLOAT_DTYPES if dtypes["k_cache"] == FP8_DTYPE else (dtypes["k_cache"],)


def kv_cache_args(dtypes: Dtypes = KV_DTYPES, *, written: bool = False) -> tuple[Arg, Arg]:
    """Declare k_cache and v_cache, which share a dtype. The spec also needs `cache_rules`."""
    dims = "num_blocks block_size num_kv_heads head_dim"
    return (
        Arg("k_cache", dims, dtypes, written=written),
        Arg("v_cache", dims, same_dtype("k_cache"), written=written),
    )


def _interval(low: float, high: float | str) -> str:
    """Return the words for "from low to high" in an error message."""
    if low == -math.inf:
        return "" if high == math.inf else f" of at most {high}"
    return f" of at least {low}" if high == math.inf else f" from {low} to {high}"


def bounded(name: str, dim: str, low: int, high: float | str = math.inf) -> Rule:
    """Rule: dimension `dim` of argument `name` has a size from low to high, if `name` is given.

    high: a number, or the name of another dimension.
    """

    def rule(sizes: SimpleNamespace) -> None:
        size = vars(sizes).get(dim, low)
        maximum = getattr(sizes, high) if isinstance(high, str) else high
        if not low <= size <= maximum:
            shown = f"{high}={maximum}" if isinstance(high, str) else high
            raise ValueError(f"{name}: expected {dim}{_interval(low, shown)}, got {size}")

    return rule


def cache_rules(name: str = "k_cache") -> tuple[Rule, ...]:
    """Rules: only num_blocks may be 0 in a cache's shape. name: the argument with the keys."""
    return tuple(bounded(name, dim, 1) for dim in ("block_size", "num_kv_heads", "head_dim"))


def _check_groups(sizes: SimpleNamespace) -> None:
    if sizes.num_q_heads == 0 or sizes.num_q_heads % sizes.num_kv_heads:
        raise ValueError(
            f"q: expected a positive multiple of num_kv_heads={sizes.num_kv_heads} as num_q_heads, "
            f"got {sizes.num_q_heads}"
        )


HEAD_RULES = (_check_groups, bounded("q", "head_dim", MIN_HEAD_DIM, MAX_HEAD_DIM))
"""Rules: num_q_heads is a multiple of num_kv_heads (GQA), and head_dim is supported."""
ROTARY_RULE = bounded("cos", "rotary_dim", 2, "head_dim")
SCALE_ARGS = tuple(
    Arg(name, "| 1 | num_kv_heads", FP32, or_number=True) for name in ("k_scale", "v_scale")
)
"""Scales of an fp8 cache; `check_scales` checks their values."""
ROTARY_ARGS = (
    Arg("positions", "num_tokens", INTEGERS),
    Arg("cos", "num_positions rotary_dim/2", FLOAT_DTYPES),
    Arg("sin", "num_positions rotary_dim/2", same_dtype("cos")),
)
"""A spec with these arguments also needs `ROTARY_RULE`."""
ALIBI_ARG = Arg("alibi_slopes", "num_q_heads | batch num_q_heads", FP32, optional=True)


def attention_spec(rows: str, *args: Arg, rules: tuple[Rule, ...] = ()) -> TensorSpec:
    """Declare k_cache, v_cache, k_scale, v_scale, q and out of an attention op, then `args`, then
    alibi_slopes and sinks.

    rows: name of the first dimension of q. q's shape is (rows, num_q_heads, head_dim).
    """
    q_dims = f"{rows} num_q_heads head_dim"
    return TensorSpec(
        *kv_cache_args(),
        *SCALE_ARGS,
        Arg("q", q_dims, query_dtypes),
        Arg("out", q_dims, lambda dtypes: (dtypes["q"], *FP32), optional=True, written=True),
        *args,
        ALIBI_ARG,
        Arg("sinks", "num_q_heads", FLOAT_DTYPES, optional=True),
        rules=(*cache_rules(), *HEAD_RULES, *rules),
    )


def store_spec(*args: Arg, rules: tuple[Rule, ...] = ()) -> TensorSpec:
    """Declare k_cache, v_cache, k_scale, v_scale, key, value and slot_mapping of an op that stores
    keys and values, then `args`."""
    rows = "num_tokens num_kv_heads head_dim"
    return TensorSpec(
        *kv_cache_args(written=True),
        *SCALE_ARGS,
        Arg("key", rows, query_dtypes),
        Arg("value", rows, same_dtype("key")),
        Arg("slot_mapping", "num_slots", INTEGERS),
        *args,
        rules=(*cache_rules(), bounded("slot_mapping", "num_slots", 0, "num_tokens"), *rules),
    )


class WrongNumber(TypeError, ValueError):
    """An argument that should be a number has another type."""


def check_number(
    name: str,
    value: float,
    low: float = -math.inf,
    high: float = math.inf,
    what: str = "a finite number",
) -> float:
    """Check that an argument is a real number (also a NumPy number) from low to high and finite in
    fp32. Return it as a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise WrongNumber(f"{name}: expected a float or an int, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not low <= number <= high or abs(number) > MAX_FP32:
        raise ValueError(f"{name}: expected {what}{_interval(low, high)}, got {value}")
    return number


def check_integer(
    name: str, value: int, low: int, high: float = math.inf, what: str = "a number"
) -> int:
    """Check that an argument is an integer (also a NumPy integer) from low to high. Return it as an
    int."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise WrongNumber(f"{name}: expected an int, got {type(value).__name__}")
    check_number(name, value, low, high, what)
    return int(value)


def check_num_splits(name: str, num_splits: int | None) -> int | None:
    """Check num_splits, a size of grid dimension 2 or 3, or None. Return it as an int or None."""
    return None if num_splits is None else check_integer(name, num_splits, 1, MAX_GRID_YZ)


def check_values(
    name: str,
    values: torch.Tensor | None,
    low: float = -math.inf,
    high: float = math.inf,
    what: str = "numbers",
    where: torch.Tensor | None = None,
) -> None:
    """Check that the values of a tensor in host memory are numbers from low to high.

    where: mask of the values to check. By default all values are checked.
    """
    if values is None or not values.is_cpu:
        return
    outside = values.isnan()
    if low > -math.inf:
        outside = outside | (values < low)
    if high < math.inf:
        outside = outside | (values > high)
    if where is not None:
        outside = outside & where
    if outside.any():
        index = outside.nonzero()[0].tolist()
        got = values[tuple(index)].item()
        raise ValueError(f"{name}: expected {what}{_interval(low, high)}, got {got} at {index}")


def check_scales(k_scale: Scale, v_scale: Scale, k_cache: torch.Tensor) -> None:
    """Check the type and the values of scales, and that a cache with scales is fp8.

    Raises:
        TypeError: a scale is neither a number nor a tensor.
        ValueError: a scale is given but the cache is not fp8, or a scale is not positive and finite
            (a tensor's values are checked only if they are in host memory).
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
        elif isinstance(scale, bool) or not isinstance(scale, Real):
            raise WrongNumber(
                f"{name}: expected a number, a torch.Tensor or None, got {type(scale).__name__}"
            )
        elif not MIN_FP32 <= scale <= MAX_FP32:
            raise ValueError(f"{name}: expected a positive finite number, got {scale}")


def check_slots(slot_mapping: torch.Tensor, k_cache: torch.Tensor) -> None:
    """Check the values of a slot mapping if it is in host memory."""
    if slot_mapping.is_cpu:
        capacity = k_cache.shape[0] * k_cache.shape[1]
        what = f"slots (num_blocks * block_size = {capacity})"
        check_values("slot_mapping", slot_mapping, high=capacity - 1, what=what)


def check_cu_seqlens(name: str, cu_seqlens: torch.Tensor, *, total: int, max_seqlen: int) -> int:
    """Check max_seqlen. If cu_seqlens is in host memory, check that it ascends from 0 to <= total.

    Return max_seqlen as an int. Errors call it by `name` with max_seqlen in place of cu_seqlens.
    """
    max_name = name.replace("cu_seqlens", "max_seqlen")
    max_seqlen = check_integer(max_name, max_seqlen, 0)
    if not cu_seqlens.is_cpu:
        return max_seqlen
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
    return max_seqlen


def check_block_tables(
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    k_cache: torch.Tensor,
    *,
    query_lens: torch.Tensor | int = 1,
    window_size: torch.Tensor | int | None = None,
    names: tuple[str, str] = ("block_tables", "context_lens"),
) -> None:
    """Check block tables and context lengths if they are in host memory.

    query_lens: number of queries at the end of each sequence. window_size: number of tokens that
    each query sees. Both are (batch,) or one number for all sequences. Table entries wholly before
    the first query's window are never read and may have any value.
    names: names of the tables and of the lengths in error messages.
    """
    if not context_lens.is_cpu or context_lens.shape[0] == 0:
        return
    tables_name, lens_name = names
    num_blocks, block_size = k_cache.shape[:2]
    max_blocks = block_tables.shape[-1]
    check_values(lens_name, context_lens, 0, what="lengths")
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
    what = "block ids within the context"
    check_values(tables_name, block_tables, 0, num_blocks - 1, what, visible)
