"""Runs the steps of the scheduler: moves blocks, prepares inputs, computes logits."""

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
        num_blocks, block_size: shape of the KV cache, zeros on the model's device.
        kv_dtype: dtype of the KV cache; the model's if None.
        num_host_blocks: blocks of the host cache, pinned if the model is on a GPU.
        max_num_seqs, max_model_len: limits of a batch.
        use_kernels: move blocks by the Triton kernels, else by their PyTorch references.
        cuda_graphs: replay decoding from CUDA graphs, captured now.

    Attributes:
        kv_cache: (2, num_layers, num_blocks, block_size, num_kv_heads_per_rank, head_dim).
        host_cache: the same shape with num_host_blocks, in host memory, or None.
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
        weight = model.model.embed_tokens.weight
        self.device = weight.device
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
        """Inputs of the model for the tokens of a step, and the rows whose logits are needed.

        Returns token_ids and positions, (num_tokens,) int64 each, the metadata, and the last row of
        each sequence whose tokens are all computed, (num_complete,) int64, in the step's order.
        """
        # Launches take sequences by kind; logits are returned in the order of the step.
        counts = np.array(step.counts)
        order = np.argsort(kinds_of_launch(counts, self._few_queries), kind="stable")
        counts, sequences = counts[order], [step.sequences[i] for i in order]
        ends = np.array([seq.num_computed_tokens for seq in sequences])
        cu_seqlens = np.concatenate(([0], counts.cumsum()))

        token_ids, unread = _token_ids(sequences, counts, ends)
        block_tables = _block_tables(sequences, manager)
        rows = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(cu_seqlens[-1]) + (ends - counts - cu_seqlens[:-1])[rows]
        columns, offsets = np.divmod(positions, self.block_size)
        slots = block_tables[rows, columns].astype(np.int64) * self.block_size + offsets
        last_rows = np.empty_like(ends)  # in the step's order
        last_rows[order] = cu_seqlens[1:] - 1
        last_rows = last_rows[
            [seq.num_computed_tokens == len(seq.token_ids) for seq in step.sequences]
        ]

        (
            ids, indices, logit_rows, unread_rows, slot_mapping, tables, cu_seqlens_q, context_lens
        ) = upload(
            self.device, token_ids, positions, last_rows, unread, slots, block_tables,
            cu_seqlens.astype(np.int32), ends.astype(np.int32),
        )  # fmt: skip
        if unread.shape[1]:
            targets, sampled_rows = unread_rows
            # A row that is not finite has -1, no valid token id; its request ends when it is read.
            ids[targets] = step.drawn.tokens[sampled_rows].clamp(min=0)
        metadata = AttentionMetadata(
            slot_mapping, tables, cu_seqlens_q, context_lens, int(counts.max()), int(ends.max())
        )
        metadata = in_parts(metadata, counts, ends, self._few_queries, self.block_size)
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
    """Zeros, (2, num_layers, num_blocks, block_size, num_kv_heads_per_rank, head_dim), on the
    model's device.  dtype: the model's if None."""
    weight = model.model.embed_tokens.weight
    shape = kv_cache_shape(
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=model.config.num_layers,
        num_kv_heads=model.num_kv_heads_per_rank,
        head_dim=model.config.head_dim,
    )
    return _zeros(shape, dtype or weight.dtype, weight.device)


def _zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pinned: bool = False
) -> torch.Tensor:
    """torch.zeros, except that pageable host memory is committed page by page, on first use."""
    if device.type != "cpu" or pinned:
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
    content = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(content).view(dtype).view(shape)


def kinds_of_launch(counts: np.ndarray, few: int) -> np.ndarray:
    """0, 1 or 2 for each sequence: one, up to ``few``, or more queries.

    Each kind has its own launch, so a sequence's key splits do not depend on its batch; see
    ``num_splits`` of ``paged_prefill_attention``.
    """
    return (counts > 1).astype(int) + (counts > max(few, 1))


def in_parts(
    metadata: AttentionMetadata, counts: np.ndarray, ends: np.ndarray, few: int, block_size: int
) -> AttentionMetadata:
    """Split a batch, whose sequences are in the order of their kinds, by kind.

    counts, ends: queries and tokens of each sequence.

    The tables of a part are no wider than it needs, so that short prompts beside long contexts do
    not get split-KV.
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
    """(num_seqs, max_blocks) int32, padded with zeros.  Rows are kept until their table changes."""
    tables = []
    for seq in sequences:
        version, row = seq.block_row
        if row is None or version != seq.table_version:
            row = np.array(manager.block_table(seq), dtype=np.int32)
            seq.block_row = seq.table_version, row
        tables.append(row)
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _token_ids(
    sequences: list[ScheduledSequence], counts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The last ``counts`` of the first ``ends`` tokens of each sequence, int64.

    Also returns (2, num_unread) int64: for each token that is sampled but not yet read, its index
    in the result and its sampled row.
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

    A batch ends before a pair that reads or writes one of its destinations, or writes one of its
    sources.
    """
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
