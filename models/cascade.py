"""Groups of decoding sequences that share leading blocks, which are read once per group.

The inputs of kernels/shared_prefix_decode_attention.py (Hydragen, Juravsky et al., 2024; vLLM's
cascade attention has one prefix for the whole batch).  Prefixes are found in the block tables, so
prefix hits, forks and beams are treated alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

CASCADE_BYTES = 16 << 20
"""Bytes of K/V saved per layer that pay for its two further launches: an H100 reads them in 5 µs at
3.35 TB/s.  Modelled, not measured."""

GRAPH_BYTES = 256 << 20
"""The same if the batch could otherwise be replayed from a CUDA graph: about 80 µs, the nine
launches of a layer."""

Group = tuple[list[int], int]
"""Rows of a batch, and the number of leading blocks that they share."""


class SharedPrefixes(NamedTuple):
    """Arguments of ``shared_prefix_decode_attention``, all int32; groups are side by side."""

    prefix_block_tables: np.ndarray | torch.Tensor
    """(num_groups, max_prefix_blocks)."""
    prefix_lens: np.ndarray | torch.Tensor
    """(num_groups,): tokens; 0 for the last group, if its sequences share nothing."""
    group_offsets: np.ndarray | torch.Tensor
    """(num_groups + 1,): the first sequence of each group."""
    suffix_block_tables: np.ndarray | torch.Tensor
    """(num_seqs, max_suffix_blocks)."""
    suffix_lens: np.ndarray | torch.Tensor
    """(num_seqs,): tokens after the prefix."""


def prefix_groups(
    tables: Sequence[np.ndarray], context_lens: np.ndarray, block_size: int
) -> list[Group]:
    """Group sequences by the first block of their tables, (num_blocks,) each.

    A group shares the leading blocks that all its tables have in common, but never all tokens of a
    sequence: at least one is left for the suffix.
    """
    by_first: defaultdict[int, list[int]] = defaultdict(list)
    for row, table in enumerate(tables):
        by_first[int(table[0])].append(row)
    groups = []
    for rows in by_first.values():
        num_blocks = (int(context_lens[rows].min()) - 1) // block_size
        if len(rows) > 1 and num_blocks:
            heads = np.stack([tables[row][:num_blocks] for row in rows])
            differs = (heads != heads[0]).any(axis=0)
            groups.append((rows, int(differs.argmax()) if differs.any() else num_blocks))
    return groups


def cascade_pays(
    groups: Sequence[Group], *, block_bytes: int, replaces_graph: bool = False
) -> bool:
    """Whether reading each prefix once saves enough: (sharers - 1) x prefix over all groups.

    block_bytes: bytes of K and V of a block in one layer.
    """
    spared = sum((len(rows) - 1) * num_blocks for rows, num_blocks in groups) * block_bytes
    return bool(groups) and spared >= (GRAPH_BYTES if replaces_graph else CASCADE_BYTES)


def group_rows(groups: Sequence[Group], num_seqs: int) -> tuple[list[int], list[Group]]:
    """Order ``num_seqs`` rows by group; returns the order, and the groups with, last, the rows that
    share nothing."""
    grouped = {row for rows, _ in groups for row in rows}
    others = [row for row in range(num_seqs) if row not in grouped]
    groups = [*groups, (others, 0)] if others else list(groups)
    return [row for rows, _ in groups for row in rows], groups


def split_tables(
    groups: Sequence[Group], block_tables: np.ndarray, context_lens: np.ndarray, block_size: int
) -> SharedPrefixes:
    """Split tables, (num_seqs, max_blocks), and lengths, (num_seqs,), of groups side by side."""
    sizes, widths = (np.array(part) for part in zip(*((len(r), n) for r, n in groups), strict=True))
    offsets = np.concatenate(([0], sizes.cumsum()))
    heads = block_tables[offsets[:-1], : widths.max()]
    shared = np.repeat(widths, sizes)
    columns = shared[:, None] + np.arange(block_tables.shape[1] - widths.min())
    tails = np.take_along_axis(block_tables, columns.clip(max=block_tables.shape[1] - 1), axis=1)
    suffix_lens = context_lens - shared * block_size
    fields = heads, widths * block_size, offsets, tails, suffix_lens
    return SharedPrefixes(*(np.ascontiguousarray(value, dtype=np.int32) for value in fields))
