"""Every message of kernels/checks.py, provoked through a public op."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import kernels
from kernels import checks, paged_decode_attention


def kv(*shape, dtype=torch.float32):
    return {"k_cache": torch.zeros(shape, dtype=dtype), "v_cache": torch.zeros(shape, dtype=dtype)}


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


BAD_CALLS = {
    "q-rank": (
        {"q": torch.zeros(2, 64)},
        "q: expected shape (batch, num_q_heads, head_dim=16), got (2, 64)",
    ),
    "q-head_dim": (
        {"q": torch.zeros(2, 4, 17)},
        "q: expected shape (batch, num_q_heads, head_dim=16), got (2, 4, 17)",
    ),
    "q-dtype": (
        {"q": torch.zeros(2, 4, 16).half()},
        "q: expected dtype torch.float32, got torch.float16",
    ),
    "q-strided": (
        {"q": torch.zeros(2, 16, 4).mT},
        "q: expected a contiguous last dimension, got strides (64, 1, 4)",
    ),
    "q-heads": (
        {"q": torch.zeros(2, 5, 16)},
        "q: expected a positive multiple of num_kv_heads=2 as num_q_heads, got 5",
    ),
    "q-no-heads": (
        {"q": torch.zeros(2, 0, 16)},
        "q: expected a positive multiple of num_kv_heads=2 as num_q_heads, got 0",
    ),
    "q-device": (
        {"q": torch.zeros(2, 4, 16, device="meta")},
        "q: expected a tensor on {device}, got one on meta",
    ),
    "q-batch": (
        {"q": torch.zeros(1, 4, 16).expand(65536, -1, -1)},
        "q: expected batch from 1 to 65535, got 65536",
    ),
    "cache-rank": (
        kv(5, 4, 32),
        "k_cache: expected shape (num_blocks, block_size, num_kv_heads, head_dim), got (5, 4, 32)",
    ),
    "cache-unlike": (
        {"v_cache": torch.zeros(5, 4, 1, 16)},
        "v_cache: expected shape (num_blocks=5, block_size=4, num_kv_heads=2, head_dim=16), "
        "got (5, 4, 1, 16)",
    ),
    "cache-two-dtypes": (
        {"v_cache": torch.zeros(5, 4, 2, 16).half()},
        "v_cache: expected dtype torch.float32, got torch.float16",
    ),
    "cache-dtype": (
        kv(5, 4, 2, 16, dtype=torch.float64),
        "k_cache: expected dtype torch.float16 or torch.bfloat16 or torch.float32 or "
        "torch.float8_e4m3fn, got torch.float64",
    ),
    "cache-strided": (
        {"k_cache": torch.zeros(5, 4, 16, 2).mT},
        "k_cache: expected a contiguous last dimension",
    ),
    "cache-empty-block": (
        kv(5, 0, 2, 16),
        "k_cache: expected block_size, num_kv_heads and head_dim of at least 1, "
        "got shape (5, 0, 2, 16)",
    ),
    "head_dim-8": (
        {"q": torch.zeros(2, 4, 8), **kv(5, 4, 2, 8)},
        "q: expected a head_dim from 16 to 256, got 8",
    ),
    "head_dim-257": (
        {"q": torch.zeros(2, 4, 257), **kv(5, 4, 2, 257)},
        "q: expected a head_dim from 16 to 256, got 257",
    ),
    "tables-batch": (
        {"block_tables": torch.zeros(3, 2).int()},
        "block_tables: expected shape (batch=2, max_blocks), got (3, 2)",
    ),
    "tables-dtype": (
        {"block_tables": torch.zeros(2, 2).long()},
        "block_tables: expected dtype torch.int32, got torch.int64",
    ),
    "tables-strided": (
        {"block_tables": torch.zeros(2, 2).int().mT},
        "block_tables: expected a contiguous last dimension",
    ),
    "lens-shape": (
        {"context_lens": torch.ones(2, 1).int()},
        "context_lens: expected shape (batch=2), got (2, 1)",
    ),
    "lens-dtype": (
        {"context_lens": torch.ones(2)},
        "context_lens: expected dtype torch.int32, got torch.float32",
    ),
    "window-0": (
        {"window_size": 0},
        "window_size: expected None (no window) or at least 1 token, got 0",
    ),
    "softcap-negative": (
        {"softcap": -1.0},
        "softcap: expected 0 (off) or a positive finite cap, got -1.0",
    ),
    "softcap-nan": (
        {"softcap": math.nan},
        "softcap: expected 0 (off) or a positive finite cap, got nan",
    ),
    "softcap-infinite": (
        {"softcap": math.inf},
        "softcap: expected 0 (off) or a positive finite cap, got inf",
    ),
    "alibi-heads": (
        {"alibi_slopes": torch.zeros(5)},
        "alibi_slopes: expected shape (num_q_heads=4), got (5,)",
    ),
    "alibi-batch": (
        {"alibi_slopes": torch.zeros(3, 4)},
        "alibi_slopes: expected shape (batch=2, num_q_heads=4), got (3, 4)",
    ),
    "alibi-dtype": (
        {"alibi_slopes": torch.zeros(4).half()},
        "alibi_slopes: expected dtype torch.float32, got torch.float16",
    ),
    "sinks-heads": (
        {"sinks": torch.zeros(2)},
        "sinks: expected shape (num_q_heads=4), got (2,)",
    ),
    "splits-0": ({"num_splits": 0}, "num_splits: expected from 1 to 65535, got 0"),
    "splits-65536": ({"num_splits": 65536}, "num_splits: expected from 1 to 65535, got 65536"),
    "out-shape": (
        {"out": torch.zeros(2, 4, 17)},
        "out: expected shape (batch=2, num_q_heads=4, head_dim=16), got (2, 4, 17)",
    ),
    "out-dtype": (
        {"out": torch.zeros(2, 4, 16).half()},
        "out: expected dtype torch.float32, got torch.float16",
    ),
}

SHARED_MEMORY = {
    "out": lambda call: paged_decode_attention(**call),
    "k_cache": lambda call: kernels.store_kvcache(**call),
    "v_cache": lambda call: kernels.rope_store_kvcache(**call),
    "query": lambda call: kernels.rope_store_kvcache(**call),
    "dst_cache": lambda call: kernels.swap_blocks(**call),
    "caches": lambda call: kernels.copy_blocks(**call),
}


@pytest.mark.parametrize("name", SHARED_MEMORY)
def test_expanded_tensors_are_not_written_to(name, device):
    rows, caches = torch.ones(1, 2, 16, device=device), torch.ones(2, 5, 4, 2, 16, device=device)
    store = {"key": rows, "value": rows, "k_cache": caches[0], "v_cache": caches[1]}
    store["slot_mapping"] = torch.tensor([3], device=device)
    angles = torch.zeros(9, 4, device=device)
    rotary = {"positions": store["slot_mapping"], "cos": angles, "sin": angles}
    pairs = {"src_to_dst": torch.tensor([[0, 1]], device=device)}
    call, shape = {
        "out": (good_call(device), (2, 4, 16)),
        "k_cache": (store, (5, 4, 2, 16)),
        "v_cache": ({"query": None, **store, **rotary}, (5, 4, 2, 16)),
        "query": ({**store, **rotary}, (1, 8, 16)),
        "dst_cache": ({"src_cache": caches[0], **pairs}, (5, 4, 2, 16)),
        "caches": (pairs, (2, 3, 5, 4, 2, 16)),
    }[name]
    expanded = torch.full((16,), 7.0, device=device).expand(shape)
    with pytest.raises(ValueError, match=rf"^{name}: expected memory of its own for every element"):
        SHARED_MEMORY[name](call | {name: expanded})
    assert (expanded == 7).all()


def test_a_dimension_of_one_may_have_any_stride(device):
    call = good_call(device)
    one = {name: call[name][:1] for name in ("q", "block_tables", "context_lens")}
    out = torch.ones(4, 16, device=device)[None].as_strided((1, 4, 16), (0, 16, 1))
    paged_decode_attention(**call | one | {"out": out})
    assert not out.any()


BAD_HOST_VALUES = {
    "lens-negative": (
        {"context_lens": i32(-1, 3)},
        "context_lens: expected lengths >= 0, got -1",
    ),
    "tables-narrow": (
        {"context_lens": i32(1, 9)},
        "block_tables: 2 columns of block_size 4 hold 8 tokens, but context_lens reaches 9; "
        "needed are 3 columns",
    ),
    "tables-negative": (
        {"block_tables": i32([0, 1], [2, -1])},
        "block_tables: expected block ids from 0 to 4 within the context, got -1 at [1, 1]",
    ),
    "tables-beyond": (
        {"block_tables": i32([5, 1], [2, 3])},
        "block_tables: expected block ids from 0 to 4 within the context, got 5 at [0, 0]",
    ),
    "tables-in-window": (
        {"block_tables": i32([-1, 1], [-1, 3]), "window_size": 5},
        "block_tables: expected block ids from 0 to 4 within the context, got -1 at [0, 0]",
    ),
}


def good_call(device):
    arguments = {
        "q": torch.zeros(2, 4, 16),
        **kv(5, 4, 2, 16),
        "block_tables": i32([0, 1], [2, 3]),
        "context_lens": i32(7, 8),
        "out": torch.ones(2, 4, 16),
    }
    return {name: tensor.to(device) for name, tensor in arguments.items()}


def assert_rejected(arguments, message, device):
    call = good_call(device)
    for name, value in arguments.items():
        is_movable = isinstance(value, torch.Tensor) and not value.is_meta
        call[name] = value.to(device) if is_movable else value
    with pytest.raises(ValueError) as error:  # noqa: PT011 the whole message is compared
        paged_decode_attention(**call)
    assert str(error.value).startswith(message.replace("{device}", str(call["k_cache"].device)))
    if "out" not in arguments:
        assert (call["out"] == 1).all()


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_input(arguments, message, device):
    assert_rejected(arguments, message, device)


@pytest.mark.parametrize(("arguments", "message"), BAD_HOST_VALUES.values(), ids=BAD_HOST_VALUES)
def test_bad_values_in_host_memory(arguments, message, device):
    if device.type != "cpu":
        pytest.skip("values of GPU tensors are not checked: that would synchronise")
    assert_rejected(arguments, message, device)


def test_table_entries_before_the_window_may_hold_anything(device):
    call = good_call(device) | {"block_tables": i32([-1, 1], [-1, 3]).to(device)}
    paged_decode_attention(**call, window_size=3)


def test_good_input_is_accepted(device):
    call = good_call(device)
    assert not paged_decode_attention(**call).any()


NO_TENSORS = (None, 1.5, [[1.0]], np.ones((2, 4, 16)))


@pytest.mark.parametrize("value", NO_TENSORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "block_tables", "context_lens"])
def test_argument_that_is_no_tensor(name, value, device):
    wanted = f"^{name}: expected a torch.Tensor, got {type(value).__name__}$"
    with pytest.raises(TypeError, match=wanted):
        paged_decode_attention(**good_call(device) | {name: value})


BAD_NUMBERS = {
    "scale": ("0.1", np.float32(0.1), torch.tensor(0.1), [0.1]),
    "softcap": (None, "1", np.float32(1), torch.tensor(1.0)),
    "window_size": ("4", 4.0, True, np.int64(4), torch.tensor(4)),
    "num_splits": ("2", 2.0, True, np.int64(2), torch.tensor(2)),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD_NUMBERS.items() for value in values],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_number_of_a_type_that_triton_does_not_take(name, value, device):
    call = good_call(device)
    wanted = rf"^{name}: expected .*, got {type(value).__name__}$"
    with pytest.raises(TypeError, match=wanted):
        paged_decode_attention(**call, **{name: value})
    assert (call["out"] == 1).all()


def test_checks_read_no_values_of_tensors_off_the_host():
    """On meta tensors, which have no values, everything that would synchronise a GPU fails."""
    cache = torch.empty(5, 4, 2, 16, device="meta")
    lens = torch.empty(3, dtype=torch.int32, device="meta")
    tables = torch.empty(3, 2, dtype=torch.int32, device="meta")
    checks.check_kv_cache(cache, cache)
    checks.check_block_tables(tables, lens, cache, batch=3, window_size=2)
    checks.check_slots(lens, cache, num_tokens=3)
    with pytest.raises(RuntimeError):
        lens.max().item()


def test_cpu_tensors_need_the_interpreter():
    script = """
import torch
from kernels import store_kvcache
t = torch.zeros(1, 1, 16)
store_kvcache(t, t, t[None], t[None], torch.zeros(1, dtype=torch.int64))
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "ValueError: k_cache: got a CPU tensor" in run.stderr
    assert "set TRITON_INTERPRET=1 in the environment before importing kernels" in run.stderr
