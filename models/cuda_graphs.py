"""Decode steps as CUDA graphs: one launch replays all kernels of a step.

Graphs are captured for some batch sizes.  A batch uses the smallest graph that holds it.  Padding
rows fill the rest; with negative slots and empty contexts they store and attend to nothing.
"""

import bisect
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.attention import AttentionMetadata
from models.decoder import CausalLM

_WARM_UPS = 2  # steps before the capture, which compile kernels and allocate workspaces


class DecodeGraphs:
    """CUDA graphs of a model's decode step, for batches of up to ``max_num_seqs`` sequences.

    Args:
        kv_cache: the model's cache, which the graphs read and write in place.
        max_blocks: width of the block tables.
    """

    def __init__(
        self, model: CausalLM, kv_cache: Tensor, *, max_num_seqs: int, max_blocks: int
    ) -> None:
        device = kv_cache.device
        weight = model.model.embed_tokens.weight
        self._model, self._kv_cache = model, kv_cache
        largest = max_num_seqs
        # 1, 2, 4 and the multiples of 8, up to the largest, and the largest itself.
        sizes = {1, 2, 4, *range(8, largest, 8), largest}
        self.batch_sizes = sorted(size for size in sizes if size <= largest)
        fixed = partial(torch.full, device=device)
        self._token_ids = fixed((largest,), 0, dtype=torch.int64)
        self._positions = fixed((largest,), 0, dtype=torch.int64)
        num_groups = len(model.groups)
        self._slot_mapping = fixed((num_groups, largest), -1, dtype=torch.int64)
        self._block_tables = fixed((num_groups, largest, max_blocks), 0, dtype=torch.int32)
        self._context_lens = fixed((largest,), 0, dtype=torch.int32)
        self._cu_seqlens = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._hidden = weight.new_zeros(largest, weight.shape[1])
        self._max_context_len = max_blocks * kv_cache.shape[3]
        self._pool: Any = None
        # Capture the largest graph first: the smaller graphs reuse its memory pool.
        self._replays = {size: self._capture(size) for size in reversed(self.batch_sizes)}

    def fits(self, metadata: AttentionMetadata) -> bool:
        """Whether the batch only decodes and is small enough."""
        return metadata.max_seqlen_q == 1 and len(metadata.context_lens) <= self.batch_sizes[-1]

    def run(self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Replay a step.  Returns hidden states, (batch, hidden_size), valid until the next run."""
        batch = len(token_ids)
        size = self.batch_sizes[bisect.bisect_left(self.batch_sizes, batch)]
        self._token_ids[:batch].copy_(token_ids)
        self._positions[:batch].copy_(positions)
        for group, part in enumerate(metadata.groups or (metadata,)):
            self._slot_mapping[group, :batch].copy_(part.slot_mapping)
            width = part.block_tables.shape[1]
            self._block_tables[group, :batch, :width].copy_(part.block_tables)
        self._slot_mapping[:, batch:size].fill_(-1)
        self._context_lens[:batch].copy_(metadata.context_lens)
        self._context_lens[batch:size].zero_()
        self._replays[size]()
        return self._hidden[:batch]

    @torch.inference_mode()
    def _capture(self, size: int) -> Callable[[], None]:
        metadata, *others = (
            AttentionMetadata(
                slot_mapping=self._slot_mapping[group, :size],
                block_tables=self._block_tables[group, :size],
                cu_seqlens_q=self._cu_seqlens[: size + 1],
                context_lens=self._context_lens[:size],
                max_seqlen_q=1,
                max_context_len=self._max_context_len,
            )
            for group in range(len(self._model.groups))
        )
        if others:
            metadata = dataclasses.replace(metadata, groups=(metadata, *others))

        def step() -> None:
            hidden = self._model(
                self._token_ids[:size], self._positions[:size], self._kv_cache, metadata
            )
            self._hidden[:size].copy_(hidden)

        for _ in range(_WARM_UPS):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        self._pool = self._pool or graph.pool()
        return graph.replay
