"""The kernel launches that SGLang, vLLM and this project make for one call of attention."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.kernel_time.model import Launch, gpu_of

if TYPE_CHECKING:
    import pandas as pd

_EXTEND_TILES = {
    "sm_90": {256: (64, 64), 512: (32, 64)},
    "sm_100": {192: (64, 64), 256: (64, 64)},
    "": {64: (64, 128), 128: (64, 128), 192: (64, 64), 256: (64, 64), 512: (32, 32)},
}
"""Queries and keys per tile of SGLang's prefill, by GPU and head_dim."""
_SEARCHED, _SEARCH_CYCLES = 64, 310
"""Number of sequences that our decode searches at a time, and the cycles in the SASS of sm_90."""
_RUN_TILES = 3
"""A run of chunks costs about as much time as three tiles, which decides the longest program."""


def launches(rows: pd.DataFrame) -> pd.DataFrame:
    """The ``Launch`` of each row.  Rows have the columns of gpu_times' attention, and for pagelab
    also ``block_size`` and ``lengths``."""
    import pandas as pd

    rules = {"sglang": _sglang, "vllm": _vllm, "pagelab": _pagelab}
    table = [rules[row.engine.split()[0]](row, gpu_of(row.gpu)) for row in rows.itertuples()]
    return pd.DataFrame(table, index=rows.index, columns=Launch._fields)


def lengths_of(row: Any) -> list[int]:
    """Tokens of each sequence of our row.  Skewed: the first sequence has half of all tokens."""
    if row.lengths == "even":
        return [row.context_tokens] * row.batch_size
    half, others = row.batch_size * row.context_tokens // 2, row.batch_size - 1
    return [half, *[half // others] * others]


def _cdiv(a: int, b: int) -> int:
    return int(-(-a // b))


@functools.cache
def _causal(tokens: int, queries: int, keys: int) -> tuple[int, int, int]:
    """Numbers of a prompt's query blocks, key tiles of the longest block, and all key tiles."""
    ends = np.minimum(tokens, queries * np.arange(1, _cdiv(tokens, queries) + 1))
    tiles = -(-ends // keys)
    return len(tiles), int(tiles[-1]), int(tiles.sum())


def _sglang(row: Any, gpu: Any) -> Launch:
    """SGLang 0.5.14. At head_dim 192 values have 128 dimensions, which costs five more launches."""
    group, dim, size = row.q_heads // row.kv_heads, row.head_dim, 1 + (row.kv_dtype != "fp8")
    dims = dim + (128 if dim == 192 else dim)
    tokens = row.batch_size * row.context_tokens
    name = f"sglang {row.phase} {dim} {row.kv_dtype}"
    launched = 2 + 2 * (size == 1) + 5 * (dim == 192)
    if row.phase == "prefill":
        queries, keys = _EXTEND_TILES.get(gpu.arch, _EXTEND_TILES[""])[dim]
        blocks, tiles, work = _causal(row.context_tokens, queries, keys)
        programs, work = (row.batch_size * row.q_heads * each for each in (blocks, work))
        asked, flops = work * keys * dims * 2, 2 * queries * keys * dims
        moved = tokens * dims * (2 * row.q_heads + row.kv_heads * (2 + size + 3 * (size == 1)))
        return Launch(name, programs, 0, tiles, work, launched, flops, asked, moved)
    heads = _cdiv(row.q_heads, min(16, group))
    queries, keys = (1, 64) if group == 1 else (16, 32)
    sequences = row.batch_size * heads
    wanted = int(gpu.multiprocessors * max(np.log2(row.context_tokens / 64), 1))
    each = _cdiv(row.context_tokens, min(_cdiv(wanted, sequences), 8))
    length = 32 * _cdiv(_cdiv(row.context_tokens, _cdiv(row.context_tokens, each)), 32)
    programs = sequences * _cdiv(row.context_tokens, length)
    tiles = _cdiv(min(length, row.context_tokens), keys)
    moved = tokens * row.kv_heads * dims * size
    return Launch(
        name + (" normal" if group == 1 else " grouped"), programs, 8 * sequences - programs,
        tiles, programs * tiles, launched + 1, queries * keys * dims * size,
        moved * heads / row.kv_heads, moved,
    )  # fmt: skip


def _vllm(row: Any, gpu: Any) -> Launch:
    """vLLM 0.24: tiles of 16 rows and 32 keys; queries and cache in fp8."""
    group, context, batch = row.q_heads // row.kv_heads, row.context_tokens, row.batch_size
    sequences, queries = batch * row.kv_heads, 16 // group
    kv_bytes = sequences * context * 2 * row.head_dim
    asked, moved, splits, launched = kv_bytes, kv_bytes, 1, 2
    blocks, tiles, work = 1, _cdiv(context, 32), _cdiv(context, 32)
    if row.query_tokens > 1:
        name, (blocks, tiles, work) = "vllm prefill", _causal(context, queries, 32)
        asked, moved = sequences * work * 64 * row.head_dim, kv_bytes * (2 * group + 6)
    elif batch > 128 // row.kv_heads:
        name = "vllm 2d"
    else:
        name, splits, launched, tiles = "vllm 3d", 16, 3, _cdiv(context, 16 * 32)
        blocks = _cdiv(context, tiles * 32)
    name += f" {row.head_dim} {row.kv_dtype}" + (" g1" if group == 1 else "")
    grid = (batch * row.query_tokens // queries + batch) * row.kv_heads * splits
    programs, work = sequences * blocks, sequences * work
    empty, flops = grid - programs, 1024 * row.head_dim
    return Launch(name, programs, empty, tiles, work, launched, flops, asked, moved)


def _pagelab(row: Any, gpu: Any) -> Launch:
    """Uses the table of tiles.  Work items of decode are assigned to programs as in the kernel."""
    import torch

    from kernels import tiles

    target = tiles.Target("cuda", int(gpu.arch.removeprefix("sm_")), gpu.multiprocessors)
    group, size = row.q_heads // row.kv_heads, 1 + (row.kv_dtype != "fp8")
    lengths, token_bytes = lengths_of(row), 2 * row.head_dim * size
    name = f"pagelab {row.phase} {row.head_dim} {row.kv_dtype} block {row.block_size} g{group}"
    moved = sum(lengths) * row.kv_heads * token_bytes
    if row.phase == "prefill":
        tile = tiles.prefill_tile(row.head_dim, torch.bfloat16, target, size)
        blocks, longest, work = _causal(row.context_tokens, tile.tile_m // group, tile.tile_n)
        programs, work = (row.batch_size * row.kv_heads * each for each in (blocks, work))
        items, search, states, searches, asked = 1, 0, 0, 0, work * tile.tile_n * token_bytes
        moved += sum(lengths) * row.q_heads * 4 * row.head_dim
    else:
        tile = tiles.decode_tile(group, row.head_dim, torch.bfloat16, target, size)
        heads, chunks = _cdiv(group, tile.tile_m), tiles.chunking(row.kv_heads)
        programs = tiles.PROGRAMS_PER_MULTIPROCESSOR * gpu.multiprocessors
        of_each, may_run = _decode_programs(
            lengths, row.kv_heads * heads, chunks, tile.tile_n, programs, size == 1
        )
        is_split = chunks.max_count(max(lengths), tile.tile_n) > 1
        name += (" runs" if may_run else " split") * is_split
        programs, work = len(of_each), int(of_each[:, 0].sum())
        slowest = max(of_each, key=lambda x: x[0] + _RUN_TILES * x[1])
        longest, items, ended, searches = map(int, slowest)
        search = is_split * 2 * _SEARCH_CYCLES * (_cdiv(row.batch_size, _SEARCHED) - 1)
        states = ended - items
        asked = moved * heads
    flops = 4 * tile.tile_m * tile.tile_n * row.head_dim
    return Launch(
        name, programs, 0, longest, work, 3, flops, asked, moved, items, search, states, searches
    )


def _decode_programs(
    lengths: list[int], heads: int, chunks: Any, tile_n: int, most: int, is_fp8: bool
) -> tuple[np.ndarray, bool]:
    """Tiles, runs, chunks and searches of each program of our decode kernel with work, (programs,
    4), as the kernel assigns them, and whether it may run over chunks. heads: tiles of rows of a
    sequence. most: maximum number of programs."""
    from kernels.paged_decode_attention import MAX_UNEVEN

    num_tiles = [max(1, _cdiv(length, tile_n)) for length in lengths]
    each = [max(chunks.min_tiles, _cdiv(tiles, chunks.max_chunks)) for tiles in num_tiles]
    pieces = len(lengths) * heads * chunks.max_count(max(lengths), tile_n)
    programs, total = min(most, pieces), sum(num_tiles) * heads
    begins = [np.arange(0, tiles, one) for tiles, one in zip(num_tiles, each, strict=True)]
    sizes = [np.diff(begin, append=tiles) for begin, tiles in zip(begins, num_tiles, strict=True)]
    may_run = not is_fp8 and max(map(len, begins)) > 1 and pieces > 4 * programs
    share, longest = _cdiv(total, programs), max(each)
    if not may_run or _cdiv(share, longest) * longest > share * MAX_UNEVEN:
        size = np.concatenate([np.repeat(one, heads) for one in sizes])
        turn, program = np.divmod(np.arange(len(size)), programs)
        program = np.where(turn % 2, programs - 1 - program, program)
        run = row = np.arange(len(size))
    else:
        size = np.concatenate([np.tile(one, heads) for one in sizes])
        run = np.repeat(np.arange(len(lengths) * heads), np.repeat([*map(len, sizes)], heads))
        head_begins = np.cumsum(np.repeat(num_tiles, heads)) - np.repeat(num_tiles, heads)
        # A share begins with the chunk whose beginning is nearest.
        middles = [
            np.tile(np.minimum(begin + one / 2, tiles), heads)
            for begin, one, tiles in zip(begins, each, num_tiles, strict=True)
        ]
        ends = np.arange(1, programs + 1)
        ends = ends * (total // programs) + np.minimum(ends, total % programs)
        program = np.searchsorted(ends, head_begins[run] + np.concatenate(middles))
        row = run // heads
    table = np.zeros((programs, 4), int)
    np.add.at(table[:, 0], program, size)
    for column, kind in ((1, run), (2, np.arange(len(size))), (3, row)):
        np.add.at(table[:, column], np.unique(np.stack([program, kind]), axis=1)[0], 1)
    if run is row:  # no search if no table has room for a next chunk
        turn, program = table[:, 2], np.arange(programs)
        position = turn * programs + np.where(turn % 2, programs - 1 - program, program)
        table[:, 3] -= position >= pieces
    else:
        table[:, 3] -= 1
    return table[table[:, 0] > 0], may_run
