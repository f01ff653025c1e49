"""Our kernels on the model: their shapes, their calls to compile, and what these launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.kernel_time.model import Gpu, Launch, _causal, _cdiv

if TYPE_CHECKING:
    import pandas as pd

    from kernels.testing.cases import Case

CARDS = ("A100-SXM", "H100-SXM", "B200-SXM", "L40S")
"""GPUs that other kernels were measured on."""
_SCAN_CYCLES = 300
"""Of a decode program, per sequence that it passes in search of its work items."""


def rows(gpu: str) -> pd.DataFrame:
    """Shapes with 32 query heads of 128: decode, even and uneven, and whole prompts."""
    import pandas as pd

    axes = ("phase", "lengths", "batch_size", "context_tokens", "kv_heads", "kv_dtype")
    contexts, heads, dtypes = [1024, 4096, 16384], [8, 4], ["bfloat16", "fp8"]
    points = [
        (["decode"], ["even"], [1, 16, 64, 256], contexts, heads, dtypes, [16, 256]),
        (["decode"], ["uneven"], [16, 64, 256], contexts, heads, dtypes, [16]),
        (["prefill"], ["even"], [1, 8], [512, 2048, 8192], heads, ["bfloat16"], [16]),
    ]
    grids = [
        pd.MultiIndex.from_product(point).to_frame(name=[*axes, "block_size"]) for point in points
    ]
    table = pd.concat(grids, ignore_index=True)
    queries = table["context_tokens"].where(table["phase"] == "prefill", 1)
    about = {"gpu": gpu, "engine": "pagelab", "q_heads": 32, "head_dim": 128}
    return table.assign(query_tokens=queries, **about)


def _lengths(row: Any) -> list[int]:
    """Tokens of each sequence. Uneven: the first has half of all."""
    if row.lengths == "even":
        return [row.context_tokens] * row.batch_size
    half, others = row.batch_size * row.context_tokens // 2, row.batch_size - 1
    return [half, *[half // others] * others]


def case(row: Any) -> Case:
    """The op of a row on meta tensors."""
    import torch

    from kernels.testing.cases import make_case

    sizes = {name: getattr(row, name) for name in ("head_dim", "block_size")}
    sizes |= {"num_q_heads": row.q_heads, "num_kv_heads": row.kv_heads, "dtype": torch.bfloat16}
    sizes |= {"context_lens": _lengths(row), "query_lens": _lengths(row), "device": "meta"}
    kv_dtype = torch.float8_e4m3fn if row.kv_dtype == "fp8" else torch.bfloat16
    options = {"kv_dtype": kv_dtype, "scales": "none", "padded": False}
    return make_case(
        f"paged_{row.phase}_attention", **sizes, **options, options={"return_lse": False}
    )


def launch(row: Any, gpu: Gpu) -> Launch:
    """By the table of tiles. Decode deals its work items to programs as the kernel does."""
    import torch

    from kernels import tiles

    target = tiles.Target("cuda", int(gpu.arch.removeprefix("sm_")), gpu.multiprocessors)
    group, size, tokens = (
        row.q_heads // row.kv_heads,
        1 + (row.kv_dtype != "fp8"),
        sum(_lengths(row)),
    )
    name = f"pagelab {row.phase} {row.head_dim} {row.kv_dtype} block {row.block_size} g{group}"
    token_bytes = 2 * row.head_dim * size
    moved = tokens * row.kv_heads * token_bytes
    if row.phase == "prefill":
        tile = tiles.prefill_tile(row.head_dim, torch.bfloat16, target, size)
        blocks, longest, work = _causal(row.context_tokens, tile.tile_m // group, tile.tile_n)
        sequences = row.batch_size * row.kv_heads
        programs, items, of_longest, scan = sequences * blocks, sequences * work, 1, 0
        asked = items * tile.tile_n * token_bytes
        moved += tokens * row.q_heads * 4 * row.head_dim
    else:
        tile = tiles.decode_tile(group, row.head_dim, torch.bfloat16, target, size)
        pieces, heads = [], _cdiv(group, tile.tile_m)
        for length in _lengths(row):
            chunks = tiles.chunking(row.kv_heads).most(length, tile.tile_n)
            pieces += [_cdiv(length, tile.tile_n * chunks)] * (chunks * row.kv_heads * heads)
        programs = min(len(pieces), tiles.PROGRAMS_PER_MULTIPROCESSOR * gpu.multiprocessors)
        of_each = np.bincount(np.arange(len(pieces)) % programs, weights=pieces)
        longest, items = int(of_each.max()), sum(pieces)
        of_longest = _cdiv(len(pieces) - int(of_each.argmax()), programs)
        asked, scan = moved * heads, _SCAN_CYCLES * row.batch_size
    flops = 4 * tile.tile_m * tile.tile_n * row.head_dim
    return Launch(name, programs, 0, longest, items, 3, flops, asked, moved, of_longest, scan)
