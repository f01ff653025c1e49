"""Runs the steps of the scheduler: moves blocks, prepares inputs, computes logits."""

from __future__ import annotations

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
from kernels.tiles import FEW_QUERIES
from models.attention import AttentionMetadata
from models.cascade import (
    Group,
    SharedPrefixes,
    cascade_pays,
    group_rows,
    prefix_groups,
    split_tables,
)
from models.cuda_graphs import DecodeGraphs
from models.decoder import CausalLM
from models.uploads import Uploads


class ModelRunner:
    """A model and its KV cache.

    Args:
        model: with its weights.
        num_blocks, block_size: of the KV cache, which lies beside the model and starts as zeros.
        kv_dtype: of the KV cache; the model's if None.
        num_host_blocks: of the host's part of the cache, pinned if the model is on a GPU.
        max_num_seqs, max_model_len: bounds of the batches to come.
        use_kernels: move blocks by the Triton kernels; else by their plain PyTorch references.
        cuda_graphs: replay decoding from CUDA graphs, captured now.

    Attributes:
        kv_cache: (2, num_layers, num_blocks, block_size, num_kv_heads_per_rank, head_dim).
        host_cache: the same with num_host_blocks, in host memory; None without any.
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
        self._upload = Uploads(self.device)
        self.kv_cache = make_kv_cache(model, num_blocks, block_size, kv_dtype)
        self.host_cache = None
        if num_host_blocks:
            shape = (*self.kv_cache.shape[:2], num_host_blocks, *self.kv_cache.shape[3:])
            pinned = self.device.type == "cuda"
            self.host_cache = _zeros(shape, self.kv_cache.dtype, torch.device("cpu"), pinned)
        ops = kernels if use_kernels else reference
        self._copy_blocks, self._swap_blocks = ops.copy_blocks, ops.swap_blocks
        backend = model.model.layers[0].self_attn.backend
        self._has_cascade = backend.has_cascade and not model.config.windows
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
        """As ``cache.serving.engine.Runner``; returns (num_rows, vocab_size)."""
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
        """Inputs of the model for the tokens of a step, and the rows that logits are wanted of.

        Returns token_ids and positions, (num_tokens,) int64 each, the metadata, and the rows,
        (number of sequences whose last token is among them,) int64.
        """
        sequences, counts = step.sequences, np.array(step.counts)
        num_single, is_mixed, order = len(counts), False, slice(None)
        if max(step.counts) > 1:
            kinds = kinds_of_launch(counts)
            num_single, is_mixed = int((kinds == 0).sum()), kinds.min() < kinds.max()
        if is_mixed:
            order = np.argsort(kinds, kind="stable")  # single tokens first
            sequences, counts = [sequences[i] for i in order], counts[order]
        ends = np.array([seq.num_computed_tokens for seq in sequences])
        tables = [
            kept[1] if (kept := seq.block_row)[0] == seq.table_version else block_row(seq, manager)
            for seq in sequences
        ]
        groups = self._prefix_groups(tables[:num_single], ends, len(counts))
        if groups:  # side by side
            rows, groups = group_rows(groups, num_single)
            rows += range(num_single, len(counts))
            sequences, tables = ([values[i] for i in rows] for values in (sequences, tables))
            ends, order = ends[rows], np.arange(len(counts))[order][rows]
        block_tables = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
        tokens = array("I")
        unknown: list[tuple[int, int]] = []  # places of tokens, and where they were drawn
        each = zip(sequences, tables, counts.tolist(), ends.tolist(), block_tables, strict=True)
        for seq, table, count, end, row in each:
            row[: len(table)] = table
            if count == 1:
                tokens.append(seq.token_ids[end - 1])
            else:
                tokens += seq.token_ids[end - count : end]
            if seq.drawn_row is not None:
                unknown.append((len(tokens) - 1, seq.drawn_row))

        if num_single == len(counts):  # the usual case, for less
            cu_seqlens, positions = np.arange(len(counts) + 1), ends - 1
            rows = cu_seqlens[:-1]
        else:
            cu_seqlens = np.concatenate(([0], counts.cumsum()))
            rows = np.repeat(np.arange(len(counts)), counts)
            positions = np.arange(len(tokens)) + (ends - counts - cu_seqlens[:-1])[rows]
        columns, offsets = np.divmod(positions, self.block_size)
        slots = block_tables[rows, columns].astype(np.int64) * self.block_size + offsets
        logit_rows = cu_seqlens[1:] - 1
        if is_mixed or groups:
            logit_rows[order] = logit_rows.copy()
        complete = [seq.num_computed_tokens == len(seq.token_ids) for seq in step.sequences]
        arrays = {
            "token_ids": np.frombuffer(tokens, dtype=np.uint32).astype(np.int64),
            "positions": positions,
            "logit_rows": logit_rows if all(complete) else logit_rows[complete],
            "slot_mapping": slots,
            "block_tables": block_tables,
            "cu_seqlens_q": cu_seqlens.astype(np.int32),
            "context_lens": ends.astype(np.int32),
        }
        if unknown:
            arrays["unknown"] = np.array(unknown).T
        if groups:
            split = split_tables(
                groups, block_tables[:num_single], ends[:num_single], self.block_size
            )
            arrays |= split._asdict()
        given = dict(zip(arrays, self._upload(*arrays.values()), strict=True))
        token_ids, positions, logit_rows = map(given.pop, ("token_ids", "positions", "logit_rows"))
        if unknown:
            places, drawn_rows = given.pop("unknown")
            # -1 of a row that is not finite, which is told when it is read, would be no token.
            token_ids[places] = step.drawn.tokens[drawn_rows].clamp(min=0)
        shared = SharedPrefixes(*map(given.pop, SharedPrefixes._fields)) if groups else None
        metadata = AttentionMetadata(
            **given,
            max_seqlen_q=int(counts.max()),
            max_context_len=int(ends.max()),
            shared=shared,
        )
        if is_mixed:
            metadata = in_parts(metadata, counts)
        return token_ids, positions, metadata, logit_rows

    def _prefix_groups(self, tables, ends: np.ndarray, num_seqs: int) -> list[Group]:
        """Groups of the sequences with ``tables`` that share prefixes, if that pays."""
        if not self._has_cascade or len(tables) < 2:
            return []
        groups = prefix_groups(tables, ends, self.block_size)
        pays = cascade_pays(
            groups,
            block_bytes=self.kv_cache[:, 0, 0].nbytes,
            replaces_graph=self._graphs is not None and len(tables) == num_seqs,
        )
        return groups if pays else []

    def _move_blocks(self, step: Step) -> None:
        if step.swap_out:
            self._swap_blocks(self.kv_cache, self.host_cache, self._pairs(step.swap_out))
        for batch in independent(step.copies):
            self._copy_blocks(self.kv_cache, self._pairs(batch))
        if step.swap_in:
            self._swap_blocks(self.host_cache, self.kv_cache, self._pairs(step.swap_in))

    def _pairs(self, pairs: Copies) -> torch.Tensor:
        return self._upload(np.array(pairs, dtype=np.int64))[0]


def make_kv_cache(
    model: CausalLM, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Zeros, (2, num_layers, num_blocks, block_size, num_kv_heads_per_rank, head_dim), beside the
    model, in its dtype or the one given."""
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
    """As torch.zeros; but pageable host memory is taken page by page, as it is used."""
    if device.type != "cpu" or pinned:
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
    content = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(content).view(dtype).view(shape)


def kinds_of_launch(counts: np.ndarray) -> np.ndarray:
    """0, 1 or 2 for each sequence with so many queries: one, few or many.

    Each kind is launched by itself, so that how the keys of a sequence are divided follows from the
    sequence alone; see ``num_splits`` of ``paged_prefill_attention``.
    """
    return (counts > 1).astype(int) + (counts > FEW_QUERIES)


def in_parts(metadata: AttentionMetadata, counts: np.ndarray) -> AttentionMetadata:
    """A batch whose sequences, with ``counts`` queries each, are in the order of their kinds, with
    the kinds told apart."""
    borders = np.flatnonzero(np.diff(kinds_of_launch(counts), prepend=-1, append=3)).tolist()
    parts = []
    for start, end in itertools.pairwise(borders):
        some = slice(start, end)
        max_seqlen_q, first = int(counts[some].max()), int(counts[:start].sum())
        tokens = slice(first, first + int(counts[some].sum()))
        parts.append(
            dataclasses.replace(
                metadata,
                slot_mapping=metadata.slot_mapping[tokens],
                block_tables=metadata.block_tables[some],
                context_lens=metadata.context_lens[some],
                cu_seqlens_q=metadata.cu_seqlens_q[start : end + 1] - first,
                max_seqlen_q=max_seqlen_q,
                shared=metadata.shared if max_seqlen_q == 1 else None,
            )
        )
    return dataclasses.replace(metadata, parts=tuple(parts))


def block_row(seq: ScheduledSequence, manager: CacheManager) -> np.ndarray:
    """Block table of a sequence, int32, which is kept until it may have changed."""
    row = np.array(manager.block_table(seq), dtype=np.int32)
    seq.block_row = seq.table_version, row
    return row


def independent(pairs: Copies) -> Iterable[Copies]:
    """Split copies, to be done in order, into batches each of which may be done in any order.

    A batch ends before a pair that reads or overwrites a destination of it, or overwrites a source
    of it.
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
