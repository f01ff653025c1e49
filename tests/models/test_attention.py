import itertools
import math
import sys
import types
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import flash_attn_compat, reference
from kernels.testing.accuracy import accuracy, bits
from kernels.testing.inputs import hidden_tokens, random_paged_batch
from models.attention import (
    AttentionMetadata,
    FlashAttnBackend,
    TorchBackend,
    TritonBackend,
    make_backend,
    padded_runs,
)
from models.layers import Rotation
from models.runner import in_parts

CPU = torch.device("cpu")
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 16


def flash_attn() -> FlashAttnBackend:
    """The backend on our kernels with flash-attn's signatures, held to its block sizes."""

    def paged(name):
        def call(q, k_cache, v_cache, **options):
            assert k_cache.shape[1] % 256 == 0
            return getattr(flash_attn_compat, name)(q, k_cache, v_cache, **options)

        return call

    names = ("flash_attn_with_kvcache", "flash_attn_varlen_func")
    module = types.SimpleNamespace(**{name: paged(name) for name in names})
    with mock.patch.dict(sys.modules, flash_attn=module):
        return FlashAttnBackend()


BACKENDS = {"torch": TorchBackend, "triton": TritonBackend, "flash_attn": flash_attn}


class Case:
    """A batch with NaN in every slot that its sequences may not read.  Block tables have -1 for
    blocks that lie wholly before the window of the first query."""

    def __init__(
        self, context_lens: list[int], query_lens: list[int], block_size: int,
        window_size: int | None = None,
    ) -> None:  # fmt: skip
        self.window_size = window_size
        batch = random_paged_batch(
            context_lens, query_lens=query_lens, block_size=block_size,
            num_q_heads=NUM_Q_HEADS + 2 * NUM_KV_HEADS, num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM, dtype=torch.float32, device=CPU,
            hidden_tokens=hidden_tokens(context_lens, query_lens, window_size),
        )  # fmt: skip
        sizes = [NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS]
        self.query, self.key, self.value = batch.q.split(sizes, 1)  # views of a fused QKV
        self.k_cache, self.v_cache, tables = batch.k_cache, batch.v_cache, batch.block_tables
        tables[(tables < 0) | (tables >= len(self.k_cache))] = -1
        counts = list(zip(context_lens, query_lens, strict=True))
        positions = torch.cat([torch.arange(n - new, n) for n, new in counts])
        rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(query_lens))
        slots = reference.slot_mapping_from_positions(positions, tables, rows, block_size)
        for cache in (self.k_cache, self.v_cache):
            cache.flatten(0, 1)[slots] = torch.nan  # the batch stores these itself
            cache[cache.isinf()] = torch.nan
        angles = torch.randn(max(context_lens), HEAD_DIM // 2, generator=torch.Generator())
        self.rotation = Rotation(positions, angles.cos(), angles.sin())
        longest = max(query_lens), max(context_lens)
        self.metadata = AttentionMetadata(
            slots, tables, batch.cu_seqlens_q, batch.context_lens, *longest
        )

    def run(self, backend, *, scale: float = 0.3, softcap: float = 0.0, **options):
        scores = {"scale": scale, "window_size": self.window_size, "softcap": softcap}
        options = dict.fromkeys(("q_norm", "k_norm", "k_scale", "v_scale")) | options
        caches = self.k_cache.clone(), self.v_cache.clone()
        rows = self.query.clone(), self.key, self.value  # queries may be rotated in place
        layer = types.SimpleNamespace(scores=scores, **options)
        return backend(*rows, self.rotation, *caches, self.metadata, layer), *caches

    def store(self, rows, caches, **scales) -> None:
        """Queries are rotated in place; keys and values are stored."""
        positions, cos, sin = self.rotation.positions, self.rotation.cos, self.rotation.sin
        slots = self.metadata.slot_mapping
        reference.rope_store_kvcache(*rows, *caches, slots, positions, cos, sin, **scales)

    def attend(self, query, caches, *, scale: float = 0.3, **options):
        lens = self.metadata.cu_seqlens_q, self.metadata.context_lens
        options |= {"max_seqlen_q": self.metadata.max_seqlen_q, "window_size": self.window_size}
        return reference.paged_prefill_attention(
            query, *caches, self.metadata.block_tables, *lens, scale=scale, **options
        )

    def expected(self, dtype, **options):
        rows = [x.to(dtype, copy=True) for x in (self.query, self.key, self.value)]
        caches = [cache.to(dtype, copy=True) for cache in (self.k_cache, self.v_cache)]
        self.store(rows, caches)
        return self.attend(rows[0], caches, **options), *caches

    def judge(self, results, **options) -> None:
        """Attention and both caches, by the fp64 rule; unused slots stay NaN."""
        low, ref = (self.expected(dtype, **options) for dtype in (torch.float32, torch.float64))
        for result, *expected in zip(results, low, ref, strict=True):
            assert torch.equal(result.isnan(), expected[1].isnan())
            judged = accuracy(*(x.nan_to_num() for x in (result, *expected)))
            assert judged.passed, judged


CASES = {
    "decode": ([5, 1, 17, 40], [1, 1, 1, 1]),
    "decode_equal_lengths": ([16, 16], [1, 1]),
    "prefill": ([5, 1, 33], [5, 1, 33]),
    "prefill_behind_cached_prefix": ([20, 33], [4, 17]),
    "mixed": ([20, 7, 1, 33, 12], [1, 7, 1, 9, 1]),
    "mixed_in_parts": ([20, 1, 12, 7, 33, 50], [1, 1, 1, 7, 9, 40]),
    "few_and_many": ([7, 50, 36], [7, 40, 36]),
}


OTHERS = ["decode", "prefill_behind_cached_prefix", "mixed_in_parts"]
KERNELS, SIZES = ["flash_attn", "triton"], [1, 3, 16]
SCORES = [(1, 0.0), (7, 0.5), (99, 0.0), (None, 0.5)]


@pytest.mark.parametrize(
    ("backend", "case", "block_size", "window_size", "softcap"),
    [*(("torch", case, size, None, 0.0) for case in CASES for size in SIZES),
     *((backend, case, SIZES[(i + j) % 3], None, 0.0)
       for i, backend in enumerate(KERNELS) for j, case in enumerate(CASES)),
     *(("torch", case, 3, *scores) for case in CASES for scores in SCORES),
     *((backend, case, 3, 7, 0.5) for backend in KERNELS for case in OTHERS)],
)  # fmt: skip
def test_backends_store_and_attend(backend, case, block_size, window_size, softcap, monkeypatch):
    if softcap or window_size:
        monkeypatch.setattr("models.attention.MASKED_QUERIES", 4)
    batch = Case(*CASES[case], block_size, window_size)
    if case in ("mixed_in_parts", "few_and_many"):
        lens, counts = map(np.array, CASES[case])
        batch.metadata = in_parts(batch.metadata, counts, lens, 32, block_size)
        assert len(batch.metadata.parts) == 3 - (case == "few_and_many")
    batch.judge(batch.run(BACKENDS[backend](), softcap=softcap), softcap=softcap)


@pytest.mark.parametrize("scales", [{}, {"k_scale": 0.5, "v_scale": 0.03}], ids=["", "scaled"])
@pytest.mark.parametrize(
    ("backend", "case"),
    [*itertools.product(["torch"], CASES), *itertools.product(["triton"], OTHERS)],
)
def test_backends_store_and_attend_to_fp8(backend, case, scales):
    """Queries attend to the stored keys and values, this batch's included."""
    batch = Case(*CASES[case], 3)
    batch.k_cache, batch.v_cache = (
        cache.to(torch.float8_e4m3fn) for cache in (batch.k_cache, batch.v_cache)
    )
    out, *caches = batch.run(BACKENDS[backend](), **scales)
    query, expected = batch.query.clone(), [batch.k_cache.clone(), batch.v_cache.clone()]
    batch.store((query, batch.key, batch.value), expected, **scales)
    for actual, wanted in zip(caches, expected, strict=True):
        assert torch.equal(bits(actual), bits(wanted))
    low, ref = (
        batch.attend(query.to(dtype), [cache.to(dtype) for cache in expected], **scales)
        for dtype in (torch.float32, torch.float64)
    )
    judged = accuracy(out, low, ref)
    assert judged.passed, judged


@pytest.mark.parametrize("num_bytes", [1, 2000, 6000])
@pytest.mark.parametrize("case", ["decode", "decode_equal_lengths"])
def test_torch_gathers_a_part_of_the_batch_at_a_time(case, num_bytes, monkeypatch):
    monkeypatch.setattr("models.attention.GATHERED_BYTES", num_bytes)
    batch = Case(*CASES[case], 3)
    batch.judge(batch.run(TorchBackend()))


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 30) | st.just(math.inf))
def test_padded_runs_are_the_longest_within_the_limit(lengths, limit):
    def padded(run):
        return max(run, default=0) * len(run)

    runs = [lengths[some] for some in padded_runs(lengths, limit)]
    assert list(itertools.chain(*runs)) == lengths
    assert all(runs)
    assert all(padded(run) <= limit or len(run) == 1 for run in runs)
    for run, following in itertools.pairwise(runs):
        assert padded([*run, following[0]]) > limit


@pytest.mark.parametrize("case", ["decode", "mixed"])
def test_flash_attn_reads_pages_of_256_in_place(case):
    batch = Case(*CASES[case], 256)
    backend = flash_attn()
    backend._repage = None  # would raise
    batch.judge(batch.run(backend))


def test_backends_that_cannot_run_are_refused(monkeypatch):
    monkeypatch.setattr("kernels.checks.INTERPRETED", types.SimpleNamespace(value=False))
    assert make_backend(None, CPU).name == "torch"
    for name, message in (
        ("flash", "'flash' is unknown; choose from triton, torch, flash_attn"),
        ("flash_attn", "runs on GPUs only"), ("triton", "TRITON_INTERPRET=1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make_backend(name, CPU)


def test_absent_flash_attn_is_an_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ImportError, match="needs the package flash-attn"):
        FlashAttnBackend()
