"""Every op, dtype and feature once, on an architecture's PTX; needs `--executor`.

`test_selection.py` runs these as a part of `make test`; the other kernel tests run on the executor
too, in many more shapes.
"""

from __future__ import annotations

import re

import pytest
import torch

from kernels import (
    add_rms_norm,
    apply_rotary_embedding,
    copy_blocks,
    gated_activation,
    merge_attention_states,
    paged_decode_attention,
    paged_prefill_attention,
    reference,
    rope_store_kvcache,
    sample_tokens,
    shared_prefix_decode_attention,
    slot_mapping_from_positions,
    store_kvcache,
    swap_blocks,
)
from kernels.testing.inputs import random_paged_batch, random_shared_prefix_args

FP8 = torch.float8_e4m3fn
FEATURES = {
    "window_size": 21,
    "softcap": 20.0,
    "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
    "sinks": torch.tensor([0.1, -0.3, 0.5, 0.0]),
    "return_lse": True,
}
PER_HEAD = {"k_scale": torch.tensor([0.7, 0.4]), "v_scale": torch.tensor([1.3, 0.9])}
SHAPE = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "device": "cpu"}


def _widen(value):
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floating else value


def check(op, reference_op, args, **options) -> None:
    """max|out - fp64| <= 2 max|the same computed eagerly in the op's dtype - fp64| + 1e-5."""

    def results(function, arguments, named):
        result = function(*arguments, **named)
        return result if isinstance(result, tuple) else (result,)

    outs = results(op, args, options)
    lows = results(reference_op, args, options)
    wide_options = {name: _widen(value) for name, value in options.items()}
    exacts = results(reference_op, [*map(_widen, args)], wide_options)
    for out, low, exact in zip(outs, lows, exacts, strict=True):
        assert torch.equal(out.isinf(), exact.isinf())
        finite = ~exact.isinf()
        allowed = 2 * (low.double() - exact)[finite].abs().max() + 1e-5
        assert (out.double() - exact)[finite].abs().max() <= allowed


def random(*shape: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "scales"),
    [
        (torch.float16, torch.float16, {}),
        (torch.bfloat16, torch.bfloat16, {}),
        (torch.float32, torch.float32, {}),
        (torch.bfloat16, FP8, PER_HEAD),
        (torch.float16, FP8, {"k_scale": 0.5, "v_scale": torch.tensor(2.0)}),
    ],
    ids=["fp16", "bf16", "fp32", "fp8 of bf16", "fp8 of fp16"],
)
def test_store(dtype, cache_dtype, scales):
    qkv = random(9, 6, 80, dtype=dtype) * 100
    key, value = qkv[:, 2:4], qkv[:, 4:]
    slots = torch.tensor([3, -1, 40, 7, 0, 47, 12, -5], dtype=torch.int64)
    caches = [torch.zeros(3, 16, 2, 80, dtype=cache_dtype) for _ in range(4)]
    store_kvcache(key, value, *caches[:2], slots, **scales)
    reference.store_kvcache(key, value, *caches[2:], slots, **scales)
    assert all(torch.equal(bits(caches[i]), bits(caches[i + 2])) for i in range(2))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved):
    cos, sin = random(32, 20), random(32, 20, seed=1)
    positions = torch.tensor([5, 0, 31, 8])
    args = (random(4, 3, 80, dtype=torch.float16), positions, cos, sin)
    check(apply_rotary_embedding, reference.apply_rotary_embedding, args, interleaved=interleaved)


@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
@pytest.mark.parametrize(("cache_dtype", "relative_step"), [(torch.bfloat16, 2**-7), (FP8, 2**-3)])
def test_rope_and_store(cache_dtype, relative_step, norms):
    """The reference rounds elsewhere: what is stored may differ by a step of its format."""
    qkv = random(5, 8, 64, dtype=torch.bfloat16)
    cos, sin = random(32, 32), random(32, 32, seed=1)
    positions, slots = torch.tensor([5, 0, 31, 8, 2]), torch.tensor([3, 17, -1, 9, 30])
    options = PER_HEAD if cache_dtype == FP8 else {}
    if norms:
        weights = random(2, 64, dtype=torch.bfloat16, seed=2)
        options = options | dict(zip(("q_norm_weight", "k_norm_weight"), weights, strict=True))

    def run(op):
        query, key, value = qkv.clone().split((4, 2, 2), dim=1)
        caches = [torch.zeros(2, 16, 2, 64, dtype=cache_dtype) for _ in range(2)]
        op(query, key, value, *caches, slots, positions, cos, sin, **options)
        return query, *caches

    results, expected = run(rope_store_kvcache), run(reference.rope_store_kvcache)
    for ours, theirs, step in zip(results, expected, (2**-7, *[relative_step] * 2), strict=True):
        distance = (ours.float() - theirs.float()).abs()
        assert (distance <= step * theirs.float().abs() + 2**-5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("hidden_size", [72, 1000, 2560])
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "residual"])
def test_norm(adds, hidden_size, dtype):
    x, residual = random(2, 3, hidden_size + 8, dtype=dtype)[..., :hidden_size]
    weight = random(hidden_size, dtype=dtype, seed=1)

    def called(op):
        def call(x, residual, weight):
            residual = residual.clone() if adds else None
            out = op(x, residual, weight, offset=1.0)
            return (out, residual) if adds else out

        return call

    check(called(add_rms_norm), called(reference.add_rms_norm), (x, residual, weight))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_gated_activation(dtype, activation):
    args = random(3, 2 * 2600, dtype=dtype).chunk(2, dim=1)
    check(gated_activation, reference.gated_activation, args, activation=activation)


@pytest.mark.parametrize("form", ["tensor", "list"])
def test_copy(form):
    pairs = torch.tensor([[0, 4], [3, 1], [-1, 2]])
    caches = [random(2, 3, 6, 5, 2, 16, dtype=torch.float16) for _ in range(2)]

    def argument(cache):
        return cache if form == "tensor" else [*zip(cache[0], cache[1], strict=True)]

    copy_blocks(argument(caches[0]), pairs)
    reference.copy_blocks(argument(caches[1]), pairs)
    assert torch.equal(*caches)


def test_swap():
    source, pairs = random(2, 2, 4, 24, 2, 16, dtype=torch.bfloat16), torch.tensor([[1, 5], [3, 0]])
    targets = [torch.zeros(2, 2, 6, 2, 24, 16, dtype=torch.bfloat16).transpose(3, 4)] * 1
    targets.append(targets[0].clone())
    swap_blocks(source, targets[0], pairs)
    reference.swap_blocks(source, targets[1], pairs)
    assert torch.equal(*targets)


def test_merge_states():
    out_a, out_b = (
        random(5, 4, 64, dtype=torch.bfloat16),
        random(5, 4, 64, dtype=torch.bfloat16, seed=1),
    )
    lse_a, lse_b = random(5, 4, seed=2), random(5, 4, seed=3)
    lse_a[0], lse_b[1] = -torch.inf, -torch.inf
    check(merge_attention_states, reference.merge_attention_states, (out_a, lse_a, out_b, lse_b))


def test_slot_mapping():
    tables = torch.tensor([[4, 2, -1], [1, 0, 3]], dtype=torch.int32)
    positions, seqs = torch.tensor([0, 7, 20, 9, 29]), torch.tensor([0, 0, 1, 1, 0])
    args = positions, tables, seqs, 10
    expected = reference.slot_mapping_from_positions(*args)
    assert torch.equal(slot_mapping_from_positions(*args), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_sample_tokens(dtype):
    logits = random(3, 2600, dtype=dtype)
    drawn = torch.tensor([0.0, 1.0, 0.5]), torch.tensor([1, -2, 2**62])
    min_ps = {"min_ps": torch.tensor([0.0, 0.1, 0.0])}
    for args, options in (((), {}), (drawn, {}), (drawn, min_ps)):
        expected = reference.sample_tokens(logits, *args, **options)
        assert torch.equal(sample_tokens(logits, *args, **options), expected)


SPLIT = {"num_splits": 2, "return_lse": True}
ATTENTION = [  # those that split are launched for shared prefixes too, and compiled once
    ("fp16", torch.float16, None, {}),
    ("fp32", torch.float32, None, {}),
    ("bf16 split", torch.bfloat16, None, SPLIT),
    ("fp8 split", torch.bfloat16, FP8, PER_HEAD | SPLIT),
    ("features split", torch.float16, None, FEATURES | SPLIT),
    ("fp8 features", torch.float16, FP8, FEATURES | PER_HEAD),
]
IDS = [name for name, *_ in ATTENTION]


@pytest.mark.parametrize(("name", "dtype", "kv_dtype", "options"), ATTENTION, ids=IDS)
def test_decode(name, dtype, kv_dtype, options):
    batch = random_paged_batch([70, 5, 0], block_size=24, dtype=dtype, kv_dtype=kv_dtype, **SHAPE)
    check(paged_decode_attention, reference.paged_decode_attention, batch.decode_args, **options)


def test_decode_of_the_largest_heads_in_blocks_of_one():
    shape = SHAPE | {"head_dim": 255, "num_q_heads": 5, "num_kv_heads": 1}
    batch = random_paged_batch([40], block_size=1, dtype=torch.float16, **shape)
    check(paged_decode_attention, reference.paged_decode_attention, batch.decode_args)


@pytest.mark.parametrize(("name", "dtype", "kv_dtype", "options"), ATTENTION, ids=IDS)
def test_prefill(name, dtype, kv_dtype, options):
    batch = random_paged_batch(
        [70, 9],
        query_lens=[33, 1],
        block_size=16,
        dtype=dtype,
        kv_dtype=kv_dtype,
        **SHAPE,
    )
    check(
        paged_prefill_attention,
        reference.paged_prefill_attention,
        batch.prefill_args,
        max_seqlen_q=batch.max_seqlen_q,
        **options,
    )


@pytest.mark.parametrize("head_dim", [40, 160])
def test_prefill_of_other_heads(head_dim):
    shape = SHAPE | {"head_dim": head_dim}
    batch = random_paged_batch([70], query_lens=[33], block_size=7, dtype=torch.bfloat16, **shape)
    args = batch.prefill_args
    check(paged_prefill_attention, reference.paged_prefill_attention, args, max_seqlen_q=33)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "options"),
    [(torch.bfloat16, None, {}), (torch.float16, None, FEATURES), (torch.bfloat16, FP8, PER_HEAD)],
    ids=["bf16", "features", "fp8"],
)
def test_shared_prefix(dtype, kv_dtype, options):
    args = random_shared_prefix_args(
        [2, 1], [70, 20], [5, 0, 30], block_size=24, dtype=dtype, kv_dtype=kv_dtype, **SHAPE
    )
    args = [arg.clone() for arg in args]  # as aligned as the arguments of decode
    check(shared_prefix_decode_attention, reference.shared_prefix_decode_attention, args, **options)


def test_the_same_seed_gives_the_same_execution(request):
    """And every order of programs and warps the same result."""
    from kernels.executor import execute_ptx

    batch = random_paged_batch([70, 5], block_size=24, dtype=torch.float16, **SHAPE)
    outs, records = [], []
    for seed in (7, 7, 8):
        architecture = request.config.getoption("--executor").removeprefix("ptx-")
        with execute_ptx(architecture, seed=seed) as execution:
            outs.append(paged_decode_attention(*batch.decode_args))
        assert len(execution.launches) == 1
        records.append(execution.launches[0].warp_instructions)
    assert records[0] == records[1] == records[2]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_the_order_of_warps_changes_no_prefill(request):
    """Nor is anything found in another one: on sm_90 and sm_100 products are in flight."""
    from kernels.executor import execute_ptx

    batch = random_paged_batch(
        [270, 9], query_lens=[33, 1], block_size=16, dtype=torch.float16, **SHAPE
    )
    outs = []
    for seed in (None, 0, 1):
        architecture = request.config.getoption("--executor").removeprefix("ptx-")
        with execute_ptx(architecture, seed=seed):
            outs.append(paged_prefill_attention(*batch.prefill_args, max_seqlen_q=33))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def _decoding_layer() -> None:
    """Launches of each kernel that a decoding model calls, one behind the other."""
    x, norm, qkv = random(2, 64), random(64), random(2, 8, 64)
    query, key, value = qkv.split((4, 2, 2), dim=1)
    batch = random_paged_batch([70, 9], block_size=16, dtype=torch.float32, **SHAPE)
    caches, cos = (batch.k_cache, batch.v_cache), random(80, 32)
    positions, slots = torch.tensor([69, 8]), torch.tensor([-1, -1])
    add_rms_norm(x, None, norm)
    rope_store_kvcache(query, key, value, *caches, slots, positions, cos, cos)
    paged_decode_attention(*batch.decode_args, num_splits=2)
    paged_prefill_attention(*batch.prefill_args, max_seqlen_q=1)
    gated_activation(x, x, "silu")
    sample_tokens(random(2, 2600), torch.ones(2), torch.tensor([0, 1]))


def test_dependent_launches_wait(request):
    """From sm_90 on a launch may begin before the one before it has ended. Each kernel has a wait
    for that end, without which it is caught at its first access of memory."""
    from kernels.executor import Fault, FaultKind, execute_ptx

    architecture = request.config.getoption("--executor").removeprefix("ptx-")
    kernels = {}
    with execute_ptx(architecture, edit=lambda name, ptx: kernels.setdefault(name, ptx)):
        _decoding_layer()
    wait = re.compile(r"griddepcontrol\.wait ?;")
    waiting = [name for name, ptx in kernels.items() if wait.search(ptx)]
    assert waiting == ([] if architecture == "sm_80" else [*kernels])
    for broken in waiting:

        def edit(name, ptx, broken=broken):
            return wait.sub("", ptx) if name == broken else ptx

        with execute_ptx(architecture, edit=edit), pytest.raises(Fault) as raised:
            _decoding_layer()
        assert (raised.value.kind, raised.value.kernel) == (FaultKind.LAUNCH_RACE, broken)
