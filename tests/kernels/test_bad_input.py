"""Bad input of every op: the message names the argument, its value and the expected one, and
nothing has been written.

Types, shapes, dtypes, devices and strides of all tensors are tested by rule, values by `RANGES`.
Other tables have (message, arguments that differ from the op's good call); "..." in a message
stands for anything.
"""

import functools
import inspect
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from op_calls import ATTENTION, copied, function, good_call, on_device, same, tensors_of
from torch import ones, zeros

from kernels import checks, paged_decode_attention, store_kvcache
from kernels.fp8_cache import FP8_DTYPE
from kernels.launch import remembered
from kernels.testing.cases import OPS, make_case
from kernels.testing.inputs import i32, i64, kv

NEW = ones(2, 3, 2, 16)
APPEND = {"k": NEW, "v": NEW, "cache_seqlens": 2}
BAD_SCALES = (
    ("expected a positive finite number, got 0.0", 0.0),
    ("expected a positive finite number, got -1", -1),
    ("expected a positive finite number, got inf", math.inf),
    ("expected a positive finite number, got nan", math.nan),
    ("expected a positive finite number, got 1e-60", 1e-60),
    ("expected a number, a torch.Tensor or None, got str", "1"),
    ("expected a number, a torch.Tensor or None, got bool", True),
    ("expected shape () or (1) or (num_kv_heads=2), got (3,)", ones(3)),
    ("expected dtype torch.float32, got torch.float16", ones(2).half()),
    ("expected a contiguous last dimension", ones(4)[::2]),
    ("expected a tensor on ... got one on meta", torch.ones(2, device="meta")),
)
FP8_OPS = [op for op in OPS if "k_scale" in inspect.signature(function(op)).parameters]
FP8_CACHE = kv(5, 4, 2, 16, dtype=FP8_DTYPE)
EVERY_FP8_OP = (
    *[
        (f"{name}: {message}", FP8_CACHE | {name: scale})
        for name in ("k_scale", "v_scale")
        for message, scale in BAD_SCALES
    ],
    ("v_scale: expected None, as only ...e4m3fn caches have", {"v_scale": 1.0}),
    *[
        (f"k_cache: expected dtype ...got {dtype}", kv(5, 4, 2, 16, dtype=dtype))
        for dtype in (torch.float8_e5m2, torch.float8_e4m3fnuz)
    ],
)
BAD_CALLS = {
    **{op: record.bad_calls for op, record in OPS.items()},
    "flash_attn_with_kvcache": (
        ("v: expected k and v together", {"k": NEW, "cache_seqlens": 2}),
        ("k: expected k and v together", {"v": NEW, "cache_seqlens": 2}),
        ("cache_seqlens: needed to append k and v", {"k": NEW, "v": NEW}),
        ("rotary_sin: expected ... together", {"rotary_cos": ones(8, 8)}),
        ("rotary_cos: needs new keys", {"rotary_cos": ones(8, 8), "rotary_sin": ones(8, 8)}),
        *[
            (f"rotary_cos: expected {message}", APPEND | {"rotary_cos": t, "rotary_sin": t})
            for message, t in (
                ("at least 8 rows, ... got 7", ones(7, 8)),
                ("rotary_dim from 2 to head_dim=16, got 18", ones(8, 9)),
            )
        ],
        ("k_cache: expected at least batch=3 rows, got 2", {"q": ones(3, 3, 4, 16)}),
        ("k_cache: expected dtype ..., got torch.float8_e4m3fn", kv(2, 8, 2, 16, dtype=FP8_DTYPE)),
        (
            "cache_batch_idx: not supported together with block_table",
            {"cache_batch_idx": i32(0, 1), "block_table": i32([0], [1])},
        ),
        ("cache_seqlens: expected 0 to 5, ... 3 are new, got 6", APPEND | {"cache_seqlens": 6}),
        ("cache_seqlens: expected 0 to 8, ... got -1", {"cache_seqlens": -1}),
        ("cache_seqlens: expected 0 to 8, ", {"cache_seqlens": 2**40}),
        *[
            (f"window_size: expected two integers ...{window}", {"window_size": window})
            for window in ((1, 2, 3), None, (1.5, 0), (True, 0))
        ],
    ),
    "flash_attn_varlen_func": (
        ("k: expected shape (num_blocks,", {"block_table": i32([0], [0])}),
        ("k: expected num_kv_heads of at least 1", {"k": ones(7, 0, 16), "v": ones(7, 0, 16)}),
        ("cu_seqlens_q: expected shape (batch+1), got (0,)", {"cu_seqlens_q": i32()}),
        ("dropout_p: only 0 is supported, got 0.1", {"dropout_p": 0.1}),
    ),
}
BAD_HOST_VALUES = {
    **{op: record.bad_values for op, record in OPS.items()},
    "flash_attn_with_kvcache": (
        ("cache_batch_idx: ...cache_seqlens reaches 9", APPEND | {"cache_seqlens": i32(2, 6)}),
        ("cache_batch_idx: ... got 2", {"cache_batch_idx": i32(0, 2)}),
        ("block_table: expected block ids", {"block_table": i32([0], [-1])}),
    ),
}


def listed(table):
    return [
        pytest.param(op, message, arguments, id=f"{op}-{message}")
        for op, cases in table.items()
        for message, arguments in cases
    ]


@functools.cache
def after_a_good_call(op, device):
    """The op, which remembers calls on any device, after its good call."""
    if op not in OPS:
        return function(op)
    remembering = remembered(inspect.unwrap(function(op)))
    remembering(**on_device(good_call(op), device))
    return remembering


def assert_rejected(op, message, arguments, device, error=ValueError, remembers=True):
    """The op, which remembers a good call, raises what begins with the message and has written
    nothing."""
    call = on_device(good_call(op) | arguments, device)
    before = copied(call)
    with pytest.raises(error) as raised:
        (after_a_good_call(op, device) if remembers else function(op))(**call)
    pattern = re.escape(message).replace(r"\.\.\.", ".*")
    assert re.match(pattern, str(raised.value)), raised.value
    assert same(call, before)


@pytest.mark.parametrize(
    ("op", "message", "arguments"),
    [
        *listed(dict.fromkeys(FP8_OPS, EVERY_FP8_OP)),
        *listed(BAD_CALLS),
    ],
)
def test_bad_input(op, message, arguments, device):
    assert_rejected(op, message, arguments, device, (ValueError, TypeError, NotImplementedError))


OPTIONAL = {
    **{op: record.optional for op, record in OPS.items()},
    "flash_attn_with_kvcache": {
        "k": NEW, "v": NEW, "cache_seqlens": i32(1, 2), "cache_leftpad": i32(0, 0),
        "cache_batch_idx": i32(0, 1), "alibi_slopes": ones(4),
    },
    "flash_attn_varlen_func": {"alibi_slopes": ones(4)},
}  # fmt: skip
FREE_DIMS = {
    **{op: record.free_dims for op, record in OPS.items()},
    "flash_attn_with_kvcache": {("q", 1)},
    "flash_attn_varlen_func": {("q", 0)},
}
"""Dimensions that no other argument has."""


@pytest.mark.parametrize("op", BAD_CALLS)
def test_every_dimension_is_checked(op, device):
    """A dimension that is one longer fits nothing else, unless no other argument has it."""
    function(op)(**on_device(good_call(op), device))
    call = good_call(op) | OPTIONAL.get(op, {})
    named = "|".join(inspect.signature(function(op)).parameters)
    wanted = "expected (shape|a positive multiple|num_slots)"
    accepted = set()
    for name, tensor in call.items():
        for dim in range(tensor.dim() if isinstance(tensor, torch.Tensor) else 0):
            shape = list(tensor.shape)
            shape[dim] += 1
            longer = torch.full(
                shape, 0.0 if tensor.is_floating_point() else -1, dtype=tensor.dtype
            )
            longer[tuple(map(slice, tensor.shape))] = tensor
            message = ""
            try:
                function(op)(**on_device(call | {name: longer}, device))
                accepted.add((name, dim))
            except ValueError as error:
                message = str(error)
            assert re.match(rf"({named}): {wanted}|$", message), (name, dim, message)
    assert accepted == FREE_DIMS.get(op, set())


COPIED = {("flash_attn", name) for name in ("q", "k", "v", "cache_batch_idx")}
ANY_STRIDES = COPIED | {("merge_atte", "lse_a"), ("merge_atte", "lse_b"), ("sample_tok", "logits")}
BROKEN = {
    "expected a torch.Tensor, got float": lambda t: 1.5,
    "expected a torch.Tensor, got ndarray": lambda t: t.numpy(),
    "expected a torch.Tensor, got list": lambda t: t.tolist(),
    "expected shape (...": lambda t: t[None],
    "expected shape ": lambda t: t[0],
    "expected dtype torch.": lambda t: t.double() if t.is_floating_point() else t.float(),
    "expected a tensor on ": lambda t: t.to("meta"),
    "expected a contiguous last dimension": lambda t: torch.stack([t, t], -1)[..., 0],
}


@pytest.mark.parametrize("message", BROKEN)
@pytest.mark.parametrize("op", BAD_CALLS)
def test_every_tensor_is_checked(op, message, device):
    """Another type, rank, dtype, device or stride of one tensor is refused by its name."""
    call = good_call(op) | OPTIONAL.get(op, {})
    for name, tensor in call.items():
        if not isinstance(tensor, torch.Tensor) or ("Tensor" in message and name == "caches"):
            continue
        if "contiguous" in message and (op[:10], name) in ANY_STRIDES:
            continue
        if "tensor on" in message and len(tensors_of(call)) == 1:
            continue
        # Either of two tensors on different devices may be the wrong one.
        named = "..." if "tensor on" in message else f"{name}: "
        got = tuple(BROKEN[message](tensor).shape) if "shape" in message else ""
        error = TypeError if "torch.Tensor" in message else ValueError
        broken = {**call, name: BROKEN[message](tensor)}
        assert_rejected(op, f"{named}{message}...{got}", broken, device, error)


BAD_SCALE = ("v_scale: expected positive finite scales", FP8_CACHE | {"v_scale": zeros(2)})


@pytest.mark.parametrize(
    ("op", "message", "arguments"),
    listed(BAD_HOST_VALUES) + listed(dict.fromkeys(FP8_OPS, (BAD_SCALE,))),
)
def test_bad_values_in_host_memory(op, message, arguments, device):
    if device.type != "cpu":
        pytest.skip("values of GPU tensors are not checked: that would synchronise")
    assert_rejected(op, message, arguments, device, remembers=False)


FLASH_ATTN = {"softmax_scale": (None, None), "softcap": (0, None)}
RANGES = {
    **{op: record.ranges for op, record in OPS.items()},
    "flash_attn_with_kvcache": FLASH_ATTN | {"num_splits": (0, 65535)},
    "flash_attn_varlen_func": FLASH_ATTN | {"max_seqlen_q": (0, None)},
}
"""Least and largest value of every number, and of every element of a tensor in host memory."""


@pytest.mark.parametrize("op", OPS)
def test_every_number_has_a_range_or_a_bad_call(op):
    record, parameters = OPS[op], inspect.signature(function(op)).parameters
    typed = {name: str(one.annotation) for name, one in parameters.items()}
    names = {name for name, kind in typed.items() if re.match(r"(<class ')?(int|float)\b", kind)}
    tensors = {name: x for name, x in good_call(op).items() if isinstance(x, torch.Tensor)}
    names |= {name for name, x in tensors.items() if not x.is_floating_point()}
    said = " ".join(message for message, _ in (*record.bad_calls, *record.bad_values))
    assert not {name for name in names - record.ranges.keys() if f"{name}: " not in said}


NO_FLOAT = ("1", True, np.bool_(True), np.ones(()), torch.tensor(1.0), [0.1])
NO_INTEGER = ("2", 2.0, True, np.bool_(True), np.float64(2), torch.tensor(2))
NUMPY_NUMBERS = {True: (np.float16, np.float32, np.float64, np.int64), False: (np.int8, np.int64)}
"""Types that are taken, by whether the argument is a float."""


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in RANGES for name in RANGES[op]])
def test_values(op, name, device):
    """A value outside its range or not finite in fp32, and an argument that is no number. Numbers
    of NumPy are taken."""
    good, (low, high) = good_call(op).get(name), RANGES[op][name]
    is_tensor = isinstance(good, torch.Tensor)
    if is_tensor and device.type != "cpu":
        pytest.skip("values of GPU tensors are not checked: that would synchronise")
    annotation = inspect.signature(function(op)).parameters[name].annotation
    is_float = good.is_floating_point() if is_tensor else "float" in str(annotation)
    outside = [] if low is None else [low - 1]
    outside += [math.inf, math.nan] if is_float else [] if high is None else [high + 1]
    outside += [1e39] if is_float and not is_tensor else []
    for value in outside:
        wrong, limit = value, low if high is None else high
        if is_tensor:
            wrong = good.clone()
            wrong.view(-1)[0] = value
        message = f"{name}: expected ...{'' if limit is None else limit}, got {value}"
        assert_rejected(op, message, {name: wrong}, device, remembers=not is_tensor)
    for wrong in () if is_tensor else NO_FLOAT if is_float else NO_INTEGER:
        if "flash" in op and not is_float and isinstance(wrong, torch.Tensor):
            continue  # it takes integers in tensors
        message = f"{name}: expected a... got {type(wrong).__name__}"
        for error in (TypeError, ValueError):
            assert_rejected(op, message, {name: wrong}, device, error)

    def called(number):
        call = on_device(good_call(op) | {name: number}, device)
        return function(op)(**call), call

    if not is_tensor:
        expected = called(4)
        assert all(same(called(number(4)), expected) for number in NUMPY_NUMBERS[is_float])


WRITTEN = [(op, name) for op in OPS for name in make_case(op, num_layers=1).writes]
WRITTEN += [(op, "out") for op in ATTENTION]
WRITTEN += [("flash_attn_with_kvcache", name) for name in ("k_cache", "v_cache")]


@pytest.mark.parametrize(("op", "name"), WRITTEN)
def test_expanded_tensors_are_not_written_to(op, name, device):
    call = on_device(good_call(op) | (APPEND if "flash" in op else {}), device)
    row = torch.full(call[name].shape[-1:], 7.0, device=device)
    expanded = row.expand(call[name].shape)
    with pytest.raises(ValueError, match=rf"^{name}: expected memory of its own for every element"):
        function(op)(**call | {name: expanded})
    assert (expanded == 7).all()


def test_a_dimension_of_one_may_have_any_stride(device):
    call = on_device(good_call("paged_decode_attention"), device)
    one = {name: call[name][:1] for name in ("q", "block_tables", "context_lens")}
    out = ones(4, 16).to(device)[None].as_strided((1, 4, 16), (0, 16, 1))
    paged_decode_attention(**call | one | {"out": out})
    assert torch.equal(out, paged_decode_attention(**call)[:1])


def test_checks_read_no_values_of_tensors_off_the_host():
    """On meta tensors, which have no values, everything that would synchronise a GPU fails."""
    cache = torch.empty(5, 4, 2, 16, device="meta")
    lens = torch.empty(3, dtype=torch.int32, device="meta")
    tables = torch.empty(3, 2, dtype=torch.int32, device="meta")
    checks.check_block_tables(tables, lens, cache, window_size=2)
    checks.check_slots(lens, cache)
    checks.check_values("positions", lens, 0, 4)
    checks.check_cu_seqlens("cu_seqlens_q", lens, total=3, max_seqlen=3)
    checks.check_scales(torch.empty(2, device="meta"), None, cache.to(FP8_DTYPE))
    with pytest.raises(RuntimeError):
        lens.max().item()


def test_cpu_tensors_need_the_interpreter(monkeypatch):
    monkeypatch.setattr(checks, "INTERPRETED", SimpleNamespace(value=False))
    t = zeros(1, 1, 19)  # a shape that no check has passed
    message = "k_cache: got a CPU tensor.*set TRITON_INTERPRET=1 .* before importing kernels"
    with pytest.raises(ValueError, match=message):
        store_kvcache(t, t, t[None], t[None], i64(0))
