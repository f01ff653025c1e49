"""Runs the scheduler's steps: moves blocks, prepares inputs, computes logits."""

import dataclasses
import itertools
import math
from array import array
from collections.abc import Iterable

import numpy as np
import torch

import kernels
from cache import CacheManager, kv_cache_shape
from cache.managers.base import Copies
from cache.serving.request import ScheduledSequence
from cache.serving.scheduler import Step
from kernels import reference
from kernels.tiles import few_queries
from models.attention import AttentionMetadata
from models.cuda_graphs import DecodeGraphs
from models.decoder import CausalLM
from models.uploads import upload


class ModelRunner:
    """A model and its KV cache.

    Args:
        model: a model with its weights.
        num_blocks, block_size: shape of the KV cache on the model's device, filled with zeros.
        kv_dtype: dtype of the KV cache.  None: the model's dtype.
        num_host_blocks: number of blocks in host memory, which is pinned if the model is on a GPU.
        max_num_seqs, max_model_len: limits of the batches that CUDA graphs hold.
        use_kernels: move blocks with the Triton kernels, else with their PyTorch references.
        cuda_graphs: capture CUDA graphs now, and replay decode steps from them.

    Attributes:
        kv_cache: (2, layers, num_blocks, block_size, num_kv_heads_per_rank, head_dim), with the
            number of layers of the model's largest group.
        host_cache: KV cache of the same shape, with num_host_blocks, in host memory.  None if
            num_host_blocks is 0.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        num_blocks: int,
        block_size: int,
        kv_dtype: torch.dtype | None = None,
        num_host_blocks: int = 0,
        max_num_seqs: int,
        max_model_len: int,
        use_kernels: bool,
        cuda_graphs: bool = False,
    ) -> None:
        self.model, self.block_size = model, block_size
        self.device = model.model.embed_tokens.weight.device
        self._few_queries = few_queries(model.num_q_heads_per_rank, model.num_kv_heads_per_rank)
        self.kv_cache = make_kv_cache(model, num_blocks, block_size, kv_dtype)
        self.host_cache = None
        if num_host_blocks:
            shape = (*self.kv_cache.shape[:2], num_host_blocks, *self.kv_cache.shape[3:])
            pinned = self.device.type == "cuda"
            self.host_cache = _zeros(shape, self.kv_cache.dtype, torch.device("cpu"), pinned)
        ops = kernels if use_kernels else reference
        self._copy_blocks, self._swap_blocks = ops.copy_blocks, ops.swap_blocks
        self._graphs = None
        if cuda_graphs:
            self._graphs = DecodeGraphs(
                model,
                self.kv_cache,
                max_num_seqs=max_num_seqs,
                max_blocks=-(-max_model_len // block_size),
            )

    @torch.inference_mode()
    def run(self, step: Step, manager: CacheManager) -> torch.Tensor:
        """Implements ``cache.serving.engine.Runner``; returns (num_rows, vocab_size)."""
        self._move_blocks(step)
        if not step.sequences:
            weight = self.model.model.embed_tokens.weight
            return weight.new_empty(0, self.model.config.vocab_size)
        token_ids, positions, metadata, logit_rows = self.prepare(step, manager)
        if self._graphs is not None and self._graphs.fits(metadata):
            hidden = self._graphs.run(token_ids, positions, metadata)
        else:
            hidden = self.model(token_ids, positions, self.kv_cache, metadata)
        return self.model.logits(hidden[logit_rows])

    def prepare(
        self, step: Step, manager: CacheManager
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor]:
        """Prepare the model's inputs for a step, and find the rows whose logits are needed.

        Returns token_ids and positions, (num_tokens,) int64 each, the metadata, and rows: the last
        row of each sequence whose tokens are then all computed, (num_complete,) int64, in the
        step's order."""
        # Sequences of a kind are adjacent in the batch; logits are in the order of the step.
        counts = np.array(step.counts)
        order = np.argsort(kinds_of_launch(counts, self._few_queries), kind="stable")
        counts, sequences = counts[order], [step.sequences[i] for i in order]
        ends = np.array([seq.num_computed_tokens for seq in sequences])
        cu_seqlens = np.concatenate(([0], counts.cumsum()))

        token_ids, unread = _token_ids(sequences, counts, ends)
        tables = _block_tables(sequences, manager)
        rows = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(cu_seqlens[-1]) + (ends - counts - cu_seqlens[:-1])[rows]
        columns, offsets = np.divmod(positions, self.block_size)
        slots = tables[:, rows, columns].astype(np.int64) * self.block_size + offsets
        last_rows = np.empty_like(ends)  # in the step's order
        last_rows[order] = cu_seqlens[1:] - 1
        last_rows = last_rows[
            [seq.num_computed_tokens == len(seq.token_ids) for seq in step.sequences]
        ]

        (
            ids, indices, logit_rows, unread_rows, slot_mapping, block_tables, cu_seqlens_q,
            context_lens,
        ) = upload(
            self.device, token_ids, positions, last_rows, unread, slots, tables,
            cu_seqlens.astype(np.int32), ends.astype(np.int32),
        )  # fmt: skip
        if unread.shape[1]:
            targets, sampled_rows = unread_rows
            # -1 marks a row that is not finite.  Its request ends when the tokens are read.
            ids[targets] = step.drawn.tokens[sampled_rows].clamp(min=0)
        most = int(counts.max()), int(ends.max())
        groups = []
        for of_group in zip(slot_mapping, block_tables, strict=True):
            metadata = AttentionMetadata(*of_group, cu_seqlens_q, context_lens, *most)
            metadata = in_parts(metadata, counts, ends, self._few_queries, self.block_size)
            groups.append(metadata)
        metadata = groups[0]
        if len(groups) > 1:
            metadata = dataclasses.replace(metadata, groups=tuple(groups))
        return ids, indices, metadata, logit_rows

    def _move_blocks(self, step: Step) -> None:
        if step.swap_out:
            self._swap_blocks(self.kv_cache, self.host_cache, torch.tensor(step.swap_out))
        for batch in independent(step.copies):
            [pairs] = upload(self.device, np.array(batch, dtype=np.int64))
            self._copy_blocks(self.kv_cache, pairs)
        if step.swap_in:
            self._swap_blocks(self.host_cache, self.kv_cache, torch.tensor(step.swap_in))


def make_kv_cache(
    model: CausalLM, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Zeros, (2, layers, num_blocks, block_size, num_kv_heads_per_rank, head_dim), on the model's
    device, with the number of layers of the largest group.  dtype: None is the model's dtype."""
    weight = model.model.embed_tokens.weight
    shape = kv_cache_shape(
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=max(group.num_layers for group in model.groups),
        num_kv_heads=model.num_kv_heads_per_rank,
        head_dim=model.config.head_dim,
    )
    return _zeros(shape, dtype or weight.dtype, weight.device)


def _zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pinned: bool = False
) -> torch.Tensor:
    """torch.zeros; but the system commits each page of pageable host memory on its first use."""
    if device.type != "cpu" or pinned:
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
    content = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(content).view(dtype).view(shape)


def kinds_of_launch(counts: np.ndarray, few: int) -> np.ndarray:
    """The kind of each sequence: 0 with one query, 1 with up to ``few`` queries, 2 with more.

    Sequences of different kinds are computed in different launches, so a sequence's key splits do
    not depend on its batch; see ``num_splits`` of ``paged_prefill_attention``.
    """
    return (counts > 1).astype(int) + (counts > max(few, 1))


def in_parts(
    metadata: AttentionMetadata, counts: np.ndarray, ends: np.ndarray, few: int, block_size: int
) -> AttentionMetadata:
    """Split a batch by kind.  Its sequences must be ordered by kind.

    counts, ends: number of queries and of tokens of each sequence.

    The block tables of a part are as wide as its longest context needs, so that short prompts do
    not get split-KV because of long contexts in another part.
    """
    kinds = kinds_of_launch(counts, few)
    borders = np.flatnonzero(np.diff(kinds, prepend=-1, append=3)).tolist()
    if len(borders) == 2:
        return metadata
    parts = []
    for start, end in itertools.pairwise(borders):
        some = slice(start, end)
        first, max_context_len = int(counts[:start].sum()), int(ends[some].max())
        tokens = slice(first, first + int(counts[some].sum()))
        parts.append(
            dataclasses.replace(
                metadata,
                slot_mapping=metadata.slot_mapping[tokens],
                block_tables=metadata.block_tables[some, : -(-max_context_len // block_size)],
                context_lens=metadata.context_lens[some],
                cu_seqlens_q=metadata.cu_seqlens_q[start : end + 1] - first,
                max_seqlen_q=int(counts[some].max()),
                max_context_len=max_context_len,
            )
        )
    return dataclasses.replace(metadata, parts=tuple(parts))


def _block_tables(sequences: list[ScheduledSequence], manager: CacheManager) -> np.ndarray:
    """(num_groups, num_seqs, max_blocks) int32, padded with zeros.  ``seq.block_rows`` caches the
    rows of a sequence, (num_groups, num_blocks)."""
    tables = []
    for seq in sequences:
        version, rows = seq.block_rows
        if rows is None or version != seq.table_version:
            rows = np.array(manager.block_tables(seq), dtype=np.int32)
            seq.block_rows = seq.table_version, rows
        tables.append(rows)
    longest = max(rows.shape[1] for rows in tables)
    padded = np.zeros((len(tables[0]), len(tables), longest), dtype=np.int32)
    for i, rows in enumerate(tables):
        padded[:, i, : rows.shape[1]] = rows
    return padded


def _token_ids(
    sequences: list[ScheduledSequence], counts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Ids of tokens ends - counts to ends of each sequence, int64.

    Also returns (2, num_unread) int64: for each of these tokens that is sampled but not yet read,
    its index in the ids and its row in the sampled tokens.
    """
    tokens, unread = array("I"), []
    for seq, count, end in zip(sequences, counts.tolist(), ends.tolist(), strict=True):
        tokens += seq.token_ids[end - count : end]
        if seq.pending_row is not None:
            unread.append((len(tokens) - 1, seq.pending_row))
    token_ids = np.frombuffer(tokens, dtype=np.uint32).astype(np.int64)
    return token_ids, np.array(unread, dtype=np.int64).reshape(-1, 2).T


def independent(pairs: Copies) -> Iterable[Copies]:
    """Split ordered copies into batches whose copies may run in any order.

    A batch ends before a pair that reads one of its destinations, or writes a source or destination
    of the batch."""
    batch: Copies = []
    sources: set[int] = set()
    destinations: set[int] = set()
    for src, dst in pairs:
        if src in destinations or dst in destinations or dst in sources:
            yield batch
            batch, sources, destinations = [], set(), set()
        batch.append((src, dst))
        sources.add(src)
        destinations.add(dst)
    if batch:
        yield batch
