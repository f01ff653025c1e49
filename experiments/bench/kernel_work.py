"""Bytes that a kernel must move and operations that it must do, for a stated problem.

From these and a GPU's datasheet follows the least time that a launch can take (the roofline of
Williams, Waterman & Patterson, 2009).  Every operand is counted once, as if caches were perfect,
and only what the result needs: no masked keys, no padding of head_dim or of tiles, no operations
but the products of attention, the weighted sums of merges, rotations, norms and activations: the
noise of sampling, about 60 instructions a token of the vocabulary, is not counted.

Splits of a sequence are merged by way of states, head_dim + 1 numbers of fp32 each.  Attention also
reads one 4-byte block id per block.  Windows are taken to be no shorter than the context, so that
options cost no work that counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.bench.gpus import Gpu
    from kernels.compiled.compile import KernelResources

BATCH, CONTEXT, SPLITS = 64, 4096, 8
PROMPT = 8192
CHUNK, FEW, CHUNK_CONTEXT = 512, 16, 32768
GROUP, PREFIX = 256, 32768
TOKENS = 8192
PAIRS, PLANES = 64, 64
VOCABULARY = 128_256


@dataclass(frozen=True)
class Work:
    problem: str
    outputs: int
    """Elements of the op's result."""
    bytes: int
    """To and from the GPU's memory."""
    operations: int
    host_bytes: int = 0
    """Over the link to the host."""

    def bound(self, gpu: Gpu) -> tuple[float, str]:
        """The least time on a GPU, in seconds, and what it is bound by."""
        times = {
            "memory": self.bytes / gpu.bandwidth,
            "arithmetic": self.operations / gpu.half_flops,
            "host link": self.host_bytes / gpu.host_bandwidth,
        }
        limit = max(times, key=times.get)
        return times[limit], limit


class _Kernel:
    """Constants of a compiled kernel as attributes, and the sizes of what its pointers point to."""

    def __init__(self, row: KernelResources) -> None:
        self._signature = row.signature
        self.__dict__.update(row.constants)

    def size(self, *pointers: str) -> int:
        """Bytes of one element of each of `pointers`, summed."""
        kinds = (self._signature[pointer] for pointer in pointers)
        return sum(int(re.search(r"\d+", kind).group()) // 8 for kind in kinds)

    def has(self, *pointers: str) -> bool:
        """Whether all of `pointers` were given."""
        return all(pointer in self._signature for pointer in pointers)

    @property
    def num_q_heads(self) -> int:
        return self.NUM_KV_HEADS * self.GROUP_SIZE

    def cache_bytes(self, batch: int, context: int) -> int:
        """K, V and block ids of `batch` contexts."""
        row = self.NUM_KV_HEADS * self.HEAD_DIM * self.size("k_cache_ptr", "v_cache_ptr")
        return batch * (context * row + 4 * -(-context // self.BLOCK_SIZE))

    def state_bytes(self, states: int) -> int:
        return states * (self.HEAD_DIM + 1) * 4

    def rotation_bytes(self) -> int:
        """cos and sin of one position for each token."""
        halves = self.size("cos_ptr", "sin_ptr") * self.ROTARY_DIM // 2
        return TOKENS * (halves + self.size("positions_ptr"))


def _decode(k: _Kernel) -> Iterator[Work]:
    rows = BATCH * k.num_q_heads
    written = k.state_bytes(rows * SPLITS) if k.IS_SPLIT else rows * k.HEAD_DIM * k.size("out_ptr")
    yield Work(
        f"{BATCH} sequences of {CONTEXT} tokens" + (f", {SPLITS} splits" * k.IS_SPLIT),
        rows * k.HEAD_DIM,
        k.cache_bytes(BATCH, CONTEXT) + rows * k.HEAD_DIM * k.size("q_ptr") + written,
        4 * rows * CONTEXT * k.HEAD_DIM,
    )


def _merge_splits(k: _Kernel) -> Iterator[Work]:
    outputs = BATCH * k.NUM_Q_HEADS * k.HEAD_DIM
    yield Work(
        f"{BATCH} sequences, {SPLITS} splits",
        outputs,
        k.state_bytes(BATCH * k.NUM_Q_HEADS * SPLITS) + outputs * k.size("out_ptr"),
        2 * outputs * SPLITS,
    )


def _prefill(k: _Kernel) -> Iterator[Work]:
    def work(problem: str, queries: int, context: int) -> Work:
        outputs = queries * k.num_q_heads * k.HEAD_DIM
        seen = queries * (context - queries) + queries * (queries + 1) // 2
        written = outputs * k.size("out_ptr")
        if k.IS_SPLIT:
            written = k.state_bytes(queries * k.num_q_heads * SPLITS)
        moved = k.cache_bytes(1, context) + outputs * k.size("q_ptr") + written
        return Work(problem, outputs, moved, 4 * seen * k.num_q_heads * k.HEAD_DIM)

    if k.IS_SPLIT:
        cached = CHUNK_CONTEXT - FEW
        yield work(f"{FEW} tokens, {cached} cached, {SPLITS} splits", FEW, CHUNK_CONTEXT)
    else:
        yield work(f"a prompt of {PROMPT} tokens", PROMPT, PROMPT)
        yield work(f"{CHUNK} tokens, {CHUNK_CONTEXT - CHUNK} cached", CHUNK, CHUNK_CONTEXT)


def _shared_prefix(k: _Kernel) -> Iterator[Work]:
    outputs = GROUP * k.num_q_heads * k.HEAD_DIM
    states = k.state_bytes(GROUP * k.num_q_heads * SPLITS)
    yield Work(
        f"{GROUP} sharing {PREFIX} tokens, {SPLITS} splits",
        outputs,
        k.cache_bytes(1, PREFIX) + outputs * k.size("q_ptr") + states,
        4 * outputs * PREFIX,
    )


def _merge_attention_states(k: _Kernel) -> Iterator[Work]:
    outputs = TOKENS * k.NUM_HEADS * k.HEAD_DIM
    lse = TOKENS * k.NUM_HEADS * k.size("lse_a_ptr", "lse_b_ptr", "lse_ptr")
    moved = outputs * k.size("out_a_ptr", "out_b_ptr", "out_ptr") + lse
    yield Work(f"{TOKENS} tokens", outputs, moved, 4 * outputs)


def _stored_bytes(k: _Kernel) -> int:
    pointers = ("key_ptr", "value_ptr", "k_cache_ptr", "v_cache_ptr")
    return TOKENS * (k.NUM_KV_HEADS * k.HEAD_DIM * k.size(*pointers) + k.size("slot_mapping_ptr"))


def _store(k: _Kernel) -> Iterator[Work]:
    outputs = 2 * TOKENS * k.NUM_KV_HEADS * k.HEAD_DIM
    yield Work(f"{TOKENS} tokens", outputs, _stored_bytes(k), 0)


def _rope_store(k: _Kernel) -> Iterator[Work]:
    queries = TOKENS * k.NUM_Q_HEADS * k.HEAD_DIM
    moved = _stored_bytes(k) + 2 * queries * k.size("query_ptr") + k.rotation_bytes()
    rows = TOKENS * (k.NUM_Q_HEADS + k.NUM_KV_HEADS)
    operations = 3 * rows * k.ROTARY_DIM
    weights = ("q_norm_weight_ptr", "k_norm_weight_ptr")
    if k.has(*weights):
        moved += k.HEAD_DIM * k.size(*weights)
        operations += 4 * rows * k.HEAD_DIM
    outputs = queries + 2 * TOKENS * k.NUM_KV_HEADS * k.HEAD_DIM
    yield Work(f"{TOKENS} tokens", outputs, moved, operations)


def _apply_rotary(k: _Kernel) -> Iterator[Work]:
    outputs = TOKENS * k.NUM_HEADS * k.HEAD_DIM
    moved = outputs * k.size("x_ptr", "out_ptr") + k.rotation_bytes()
    yield Work(f"{TOKENS} tokens", outputs, moved, 3 * TOKENS * k.NUM_HEADS * k.ROTARY_DIM)


def _add_rms_norm(k: _Kernel) -> Iterator[Work]:
    elements, adds = TOKENS * k.HIDDEN_SIZE, k.has("residual_ptr")
    moved = elements * k.size("x_ptr", "out_ptr") + k.HIDDEN_SIZE * k.size("weight_ptr")
    if adds:
        moved += 2 * elements * k.size("residual_ptr")
    yield Work(f"{TOKENS} tokens", elements * (1 + adds), moved, elements * (4 + adds))


def _gated_activation(k: _Kernel) -> Iterator[Work]:
    outputs = TOKENS * k.SIZE
    moved = outputs * k.size("gate_ptr", "up_ptr", "out_ptr")
    yield Work(f"{TOKENS} tokens", outputs, moved, 8 * outputs)


def _copied(k: _Kernel) -> tuple[str, int]:
    problem = f"{PAIRS} blocks, K and V of {PLANES // 2} layers"
    return problem, PAIRS * PLANES * k.NUM_ELEMENTS


def _copy_blocks(k: _Kernel) -> Iterator[Work]:
    problem, elements = _copied(k)
    itemsize = int(k.DTYPE.lstrip("uint")) // 8
    yield Work(problem, elements, 2 * elements * itemsize, 0)


def _swap_blocks(k: _Kernel) -> Iterator[Work]:
    problem, elements = _copied(k)
    itemsize = k.size("src_ptr")
    yield Work(problem, elements, elements * itemsize, 0, host_bytes=elements * itemsize)


_TABLE_BLOCK_SIZE = 16
"""Slots that an entry of a block table stands for, which slot mapping takes as it comes."""


def _slot_mapping(k: _Kernel) -> Iterator[Work]:
    moved = TOKENS * k.size("positions_ptr", "seq_ids_ptr", "slots_ptr")
    yield Work(f"{TOKENS} tokens", TOKENS, moved + 4 * TOKENS // _TABLE_BLOCK_SIZE, 0)


def _sample_tokens(k: _Kernel) -> Iterator[Work]:
    given = ("temperatures_ptr", "noise_seeds_ptr", "min_ps_ptr")
    row = VOCABULARY * k.size("logits_ptr") + SPLITS * k.size("scores_ptr", "tokens_ptr")
    row += k.size(*filter(k.has, given))
    yield Work(f"{BATCH} rows of {VOCABULARY} logits, {SPLITS} parts", BATCH, BATCH * row, 0)


def _merge_samples(k: _Kernel) -> Iterator[Work]:
    row = SPLITS * k.size("scores_ptr", "tokens_ptr") + k.size("out_ptr")
    yield Work(f"{BATCH} rows, {SPLITS} parts", BATCH, BATCH * row, 0)


_WORK: dict[str, Callable[[_Kernel], Iterator[Work]]] = {
    "paged_decode": _decode,
    "merge_splits": _merge_splits,
    "paged_prefill": _prefill,
    "shared_prefix": _shared_prefix,
    "merge_attention_states": _merge_attention_states,
    "store_kvcache": _store,
    "rope_store_kvcache": _rope_store,
    "apply_rotary_embedding": _apply_rotary,
    "add_rms_norm": _add_rms_norm,
    "gated_activation": _gated_activation,
    "copy_blocks": _copy_blocks,
    "swap_blocks": _swap_blocks,
    "slot_mapping": _slot_mapping,
    "sample_tokens": _sample_tokens,
    "merge_samples": _merge_samples,
}


def kernel_name(row: KernelResources) -> str:
    """The kernel's function without the underscore and `_kernel`; shared_prefix where prefill's
    computes the prefix of cascade."""
    if "suffix_lens_ptr" in row.signature:
        return "shared_prefix"
    return row.kernel.strip("_").removesuffix("_kernel")


def work_of(row: KernelResources) -> list[Work]:
    """What one launch of a compiled kernel has to do, for each of its problems."""
    return list(_WORK[kernel_name(row)](_Kernel(row)))
