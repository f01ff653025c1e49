"""A clock that gives the time of an engine's steps on a GPU, from published operator times.

    clock = GpuClock("opt-13b", "A100-SXM", host_seconds=0.01)
    open_loop.serve(engine, prompts, lengths, arrivals, service=clock)

Nothing runs on a GPU.  A step takes

    host + layers * (products + small kernels + attention + all-reduces)
    + LM head + sampling + copies

Times of products, attention and all-reduces are interpolated in the tables of
experiments/gpu_times. The rest is modelled:

* Decoding sequences of unequal lengths: a sequence takes 1/n of a batch of n sequences of its
  length. The sum is at least the time of the longest sequence alone.
* A chunk of a prompt after a cached prefix: the time of a whole prompt with as many pairs of query
  and key. Several chunks are combined like decoding sequences.
* Decoding contexts of up to twice the table's longest: linear extrapolation from the last two rows.
  Tested on the longest rows of all tables, at batches of 1 to 8, the error is 10.5 % (median 3 %);
  on an H100 5 %, at most 32 % (Llama 3.1 8B: 4 %, at most 9 %). The largest error is 74 %, on the
  L40S, whose L2 held the K/V of both earlier rows.
* Decoding with more KV heads than the table has (A100: 8): more sequences of 8 heads.
* A product with more columns than the table has (LM heads): several products of equal size.
* Small kernels (norms, RoPE, activations): their bytes at 80 % of the bandwidth, and 2 us each.
  Sampling reads the logits five times.
* Block copies: the memory's bandwidth. Swaps: the bandwidth of the link to the host. K and V of
  each layer are separate transfers. Each takes ``transfer_seconds`` more than its bytes. Swaps and
  computation take turns, as in this project's runner. With ``overlaps_swaps`` the longest of
  computation, swaps out and swaps in counts: the bound of systems that load layer by layer.
* A GPU whose bandwidth was not measured: memory-bound time scales with the bandwidth.

The caller assumes ``transfer_seconds`` and ``host_seconds``, the engine's own time per step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from cache.checks import at_least, finite
from cache.serving.scheduler import Step
from experiments import gpu_times

CLOCK_DISCLAIMER = (
    "Scheduling, allocation, eviction and preemption are the project's own code; time is the sum "
    "of operator times that others measured, interpolated, plus an assumed host time."
)
"""Printed in every table and figure that uses this clock."""

SMALL_KERNELS = 6
"""Per layer."""
_SMALL_KERNEL_S = 2e-6
_STREAM_EFFICIENCY = 0.8
_GRAIN = 16
"""Distance of the tabulated contexts of decoding sequences, in tokens."""


class GpuClock:
    """Gives the duration of a step of ``model`` on ``tensor_parallel`` GPUs.

    Args:
        model: a row of gpu_times/models.csv, a dense decoder in bf16.
        gpu: a row of gpu_times/cards.csv; bandwidths are the maker's, in bytes per second.
        host_seconds: assumed time of the engine's own code in each step.
        transfer_seconds: assumed time of each transfer to or from the host, besides its bytes'
        time.
        block_size: tokens of the blocks that steps copy and swap.
        host_bandwidth: bytes per second to and from the host. None: the maker's, from cards.csv.
        overlaps_swaps: see above.

    Raises ValueError for a step beyond the measured range, and for a model, GPU or shape that was
    not measured (the message lists the measured values).
    """

    def __init__(
        self,
        model: str,
        gpu: str,
        tensor_parallel: int = 1,
        *,
        host_seconds: float = 0.0,
        transfer_seconds: float = 0.0,
        block_size: int = 16,
        host_bandwidth: float | None = None,
        overlaps_swaps: bool = False,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
    ) -> None:
        (shape,) = gpu_times.rows("models", model=model).itertuples()
        (card,) = gpu_times.rows("cards", card=gpu).itertuples()
        self.model, self.gpu = model, gpu
        self.tensor_parallel = at_least(1, "tensor_parallel", tensor_parallel)
        self.host_seconds = finite("host_seconds", host_seconds)
        self.transfer_seconds = finite("transfer_seconds", transfer_seconds)
        self.block_size = at_least(1, "block_size", block_size)
        self.max_num_seqs = at_least(1, "max_num_seqs", max_num_seqs, 2**20)
        self.max_num_batched_tokens = at_least(
            1, "max_num_batched_tokens", max_num_batched_tokens, 2**20
        )
        self._shape, self._card = shape, card
        bandwidth = card.host_bandwidth if host_bandwidth is None else host_bandwidth
        self.host_bandwidth = finite("host_bandwidth", bandwidth, positive=True)
        self.overlaps_swaps = overlaps_swaps
        self._slow = card.measured_bandwidth / card.bandwidth
        self._dense = self._dense_seconds()
        self._head = self._head_seconds()
        self._set_up_attention()

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values, summed over all layers and GPUs."""
        return 4 * self._shape.layers * self._shape.kv_heads * self._shape.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, summed over all layers and GPUs."""
        return self.block_size * self.kv_bytes_per_token

    def duration(self, step: Step) -> float:
        """Seconds that ``step`` takes."""
        contexts, chunks, rows = [], [], 0
        for seq, count in zip(step.sequences, step.counts, strict=True):
            context = seq.num_computed_tokens  # this step's included
            rows += context == len(seq.token_ids)
            if count == 1:
                contexts.append(context)
            else:
                chunks.append((count, context))
        block_bytes = self.block_bytes / self.tensor_parallel
        copied = 2 * len(step.copies) * block_bytes / self._card.bandwidth
        swapped = block_bytes / self.host_bandwidth
        swapped += 2 * self._shape.layers * self.transfer_seconds
        swap_out, swap_in = len(step.swap_out) * swapped, len(step.swap_in) * swapped
        computed = self.seconds(contexts, chunks, rows) + copied
        if self.overlaps_swaps:
            return max(computed, swap_out, swap_in)
        return computed + swap_out + swap_in

    def seconds(
        self, contexts: Sequence[int], chunks: Sequence[tuple[int, int]] = (), rows: int = 0
    ) -> float:
        """Seconds of a step without copies.

        contexts: number of keys of each decoding sequence, including the new token's key.
        chunks: for each prompt, number of query tokens and of keys (including these tokens' keys).
        rows: number of sequences that sample a token; 0: all decoding sequences.
        """
        tokens = len(contexts) + sum(count for count, _ in chunks)
        rows = rows or len(contexts)
        if tokens > self.max_num_batched_tokens or rows > self.max_num_seqs:
            raise ValueError(
                f"a step of {tokens} tokens and {rows} sequences: this clock has at most "
                f"{self.max_num_batched_tokens} and {self.max_num_seqs}"
            )
        if not tokens:
            return self.host_seconds
        attention = self._decode_seconds(contexts) + self._prefill_seconds(chunks)
        if contexts and chunks:
            attention -= self._floor  # one launch computes both
        layers = self._shape.layers * attention
        return self.host_seconds + float(self._dense[tokens] + self._head[rows]) + layers

    def _dense_seconds(self) -> np.ndarray:
        """Seconds of all layers without attention, indexed by the number of tokens of the step."""
        shape, parts = self._shape, self.tensor_parallel
        tokens = np.arange(1, self.max_num_batched_tokens + 1)
        heads, wide = shape.q_heads * shape.head_dim, shape.intermediate * shape.up_products
        qkv = heads + 2 * shape.kv_heads * shape.head_dim
        layer = self._product(tokens, qkv // parts, shape.hidden)
        layer += self._product(tokens, shape.hidden, heads // parts)
        layer += self._product(tokens, wide // parts, shape.hidden)
        layer += self._product(tokens, shape.hidden, shape.intermediate // parts)
        streamed = 8 * shape.hidden + (2 * qkv + wide + shape.intermediate) / parts
        layer += SMALL_KERNELS * _SMALL_KERNEL_S
        layer += 2 * streamed * tokens / (self._card.bandwidth * _STREAM_EFFICIENCY)
        if parts > 1:
            measured = {"gpu": self._card.gpu, "backend": "vllm_graph", "num_gpus": parts}
            all_reduce = gpu_times.grid("allreduce", ("message_size",), **measured)
            layer += 2 * all_reduce(message_size=tokens * shape.hidden)
        return np.append(0.0, shape.layers * layer)

    def _head_seconds(self) -> np.ndarray:
        """Seconds of LM head and sampling, indexed by the number of sequences that sample."""
        rows = np.arange(1, self.max_num_seqs + 1)
        seconds = self._product(rows, self._shape.vocab // self.tensor_parallel, self._shape.hidden)
        logits = 5 * 4 * self._shape.vocab * rows / self._card.bandwidth
        return np.append(0.0, seconds + logits + 10 * _SMALL_KERNEL_S)

    def _product(self, m: np.ndarray, n: int, k: int) -> np.ndarray:
        times = gpu_times.grid("gemm_bf16", ("m", "n", "k"), gpu=self._card.gpu)
        parts = -(-n // int(times.axes["n"][-1]))
        seconds = times(m=m, n=n / parts, k=k)
        # A slower memory reads the weights more slowly. One row's time is the time of this read.
        return parts * (seconds + (self._slow - 1) * times(m=1, n=n / parts, k=k))

    def _set_up_attention(self) -> None:
        shape, parts = self._shape, self.tensor_parallel
        heads, kv_heads = shape.q_heads // parts, shape.kv_heads // parts
        folds = max(1, kv_heads // 8)
        times = functools.partial(
            gpu_times.grid,
            "attention",
            ("batch_size", "context_tokens"),
            gpu=self._card.gpu,
            kernel=self._card.kernel,
            kv_dtype="bfloat16",
            head_dim=shape.head_dim,
        )
        self._prefill = times(phase="prefill", q_heads=heads, kv_heads=kv_heads)
        self._decode = times(phase="decode", q_heads=heads // folds, kv_heads=kv_heads // folds)
        self._folds = folds
        measured = int(self._decode.axes["context_tokens"][-1])
        self._longest = max(measured, min(2 * measured, shape.positions))
        self._floor = self._slow * float(self._decode(batch_size=1, context_tokens=1))
        self._share = functools.cache(self._tabulate_share)

    def _tabulate_share(self, batch: int) -> np.ndarray:
        """Seconds of one of ``batch`` sequences of equal contexts, indexed by context // _GRAIN."""
        middles = (np.arange(self._longest // _GRAIN + 1) + 0.5) * _GRAIN
        contexts = np.minimum(middles, self._longest)
        before, last = self._decode.axes["context_tokens"][-2:]
        times = functools.partial(_in_parts, self._decode, batch * self._folds)
        growth = (times(last) - times(before)) / (last - before)
        seconds = times(np.minimum(contexts, last)) + growth * np.maximum(contexts - last, 0)
        return self._slow * seconds / batch

    def _decode_seconds(self, contexts: Sequence[int]) -> float:
        if not len(contexts):
            return 0.0
        if max(contexts) > self._longest:
            raise ValueError(
                f"a context of {max(contexts)} tokens: {self.model} with {self._decode.what} has 1 "
                f"to {self._longest}"
            )
        places = np.asarray(contexts) // _GRAIN
        together = float(self._share(len(contexts))[places].sum())
        return max(together, float(self._share(1)[places.max()]))

    def _prefill_seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        if not chunks:
            return 0.0
        queries, keys = np.array(chunks, float).T
        pairs = queries * (keys - queries) + queries * (queries + 1) / 2
        # Work beyond the table's longest prompt is divided into several prompts of equal work.
        longest = self._prefill.axes["context_tokens"][-1]
        pieces = np.ceil(2 * pairs / longest**2)
        lengths = np.sqrt(2 * pairs / pieces)
        together = pieces * _in_parts(self._prefill, len(chunks), lengths) / len(chunks)
        alone = pieces * self._prefill(batch_size=1, context_tokens=lengths)
        return max(float(together.sum()), float(alone.max()))


def _in_parts(times: gpu_times.Grid, batch: int, contexts: np.ndarray) -> np.ndarray:
    """Seconds of a batch.  A batch larger than the table's largest is divided into equal parts."""
    parts = -(-batch // int(times.axes["batch_size"][-1]))
    return parts * times(batch_size=batch / parts, context_tokens=contexts)
