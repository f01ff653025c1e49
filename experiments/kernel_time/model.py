"""Time of Triton attention kernels on a GPU, from their machine code and the launch's shape.

    measured = gpu_times.rows("attention", kernel="triton", gpu="H100-SXM")
    launched = launches(measured)
    microseconds("H100-SXM", launched, fit("H100-SXM", launched, measured["microseconds"]))

``compiled.py`` writes what is known of each kernel to ``kernels.csv``. The launch's shape comes
from the rules of the launching code. A pass of the loop over tiles takes

- the cycles of its warp (``sass.py``), at a latency between those of L2 and of memory by the share
  of the bytes that come from memory;
- half of the instructions, shared-memory wavefronts and tensor-core cycles of the other warps that
  reside on the multiprocessor;
- its bytes, and those of spilled registers, at 64 per cycle.

That time, the one of all resident programs' bytes at the memory's bandwidth, and the tensor cores'
are joined by a 4-norm. Programs beyond the resident ones follow without a gap, and half a program
at the end runs alone. The merge of splits counts as a launch and no more.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

TABLE = Path(__file__).with_name("kernels.csv")


class Gpu(NamedTuple):
    """A GPU by its maker's data sheet."""

    arch: str
    multiprocessors: int
    ghz: float
    bandwidth: float
    """GB per second."""
    l2_mb: float
    """0.72 of L2; 0.45 where two partitions hold copies of what both read."""
    tflops: float
    """Dense bf16 products."""


GPUS = {
    "A100-SXM": Gpu("sm_80", 108, 1.41, 2039, 18, 312),
    "H100-SXM": Gpu("sm_90", 132, 1.755, 3352, 22.5, 989),
    "H200-SXM": Gpu("sm_90", 132, 1.755, 4800, 22.5, 989),
    "B200-SXM": Gpu("sm_100", 148, 1.85, 8000, 57, 2250),
    "GB200": Gpu("sm_100", 152, 1.92, 8000, 57, 2500),
    "L40S": Gpu("sm_89", 142, 2.3, 864, 69, 362),
    "RTX-PRO-6000": Gpu("sm_120", 188, 2.4, 1597, 92, 504),
}

# Chosen while looking at all rows of the H100, B200 and L40S, before a row of another was compared.
CROWDING, L2_LATENCY, TAIL, NORM = 0.5, 0.3, 0.5, 4
"""Share of others' work that a warp waits for; latency of L2 by memory's; part that runs alone."""
SPILL_CYCLES, DISPATCH_CYCLES, LAUNCH_US = 2, 200, 1.6
"""Per spilled register of a warp; per start of a program; microseconds of a launch after two."""


class Constants(NamedTuple):
    """What is fitted per GPU."""

    latency_ns: float
    """Of memory under load."""
    bandwidth: float
    """Share of the data sheet's."""
    floor_us: float
    """Two launches that do nothing."""


class Launch(NamedTuple):
    """What a call launches."""

    kernel: str
    programs: int
    """With work."""
    empty: int
    tiles: int
    """Passes of the tile loop in the longest program."""
    work: int
    """Passes in all programs."""
    launches: int
    tile_flops: float
    asked: float
    """Bytes of keys and values that all programs read."""
    moved: float
    """Bytes that are read or written at least once."""
    items: int = 1
    """Work items, one after another, of the longest program."""
    cycles: float = 0
    """Further ones of every program."""


def _cdiv(a: int, b: int) -> int:
    return int(-(-a // b))


@functools.cache
def _causal(tokens: int, rows: int, columns: int) -> tuple[int, int, int]:
    """Blocks of ``rows`` queries; tiles of ``columns`` keys of the longest one, and of all."""
    blocks = _cdiv(tokens, rows)
    tiles = -(-np.minimum(tokens, rows * np.arange(1, blocks + 1)) // columns)
    return blocks, int(tiles[-1]), int(tiles.sum())


_EXTEND_TILES = {
    "sm_90": {256: (64, 64), 512: (32, 64)},
    "sm_100": {192: (64, 64), 256: (64, 64)},
    "": {64: (64, 128), 128: (64, 128), 192: (64, 64), 256: (64, 64), 512: (32, 32)},
}
"""Queries and keys of a tile of SGLang's prefill, by head_dim; the last for small shared memory."""


def _sglang(row: Any, gpu: Gpu) -> Launch:
    """SGLang 0.5.14. At head_dim 192 values have 128, which costs five launches more."""
    group, dim, size = row.q_heads // row.kv_heads, row.head_dim, 1 + (row.kv_dtype != "fp8")
    dims = dim + (128 if dim == 192 else dim)
    tokens = row.batch_size * row.context_tokens
    name = f"sglang {row.phase} {dim} {row.kv_dtype}"
    launched = 2 + (2 if size == 1 else 0) + (5 if dim == 192 else 0)
    if row.phase == "decode":
        heads, rows, columns = _cdiv(row.q_heads, min(16, group)), 16, 32
        if group == 1:
            rows, columns = 1, 64
        sequences = row.batch_size * heads
        wanted = int(gpu.multiprocessors * max(np.log2(row.context_tokens / 64), 1))
        each = _cdiv(row.context_tokens, min(_cdiv(wanted, sequences), 8))
        length = 32 * _cdiv(_cdiv(row.context_tokens, _cdiv(row.context_tokens, each)), 32)
        programs = sequences * _cdiv(row.context_tokens, length)
        tiles = _cdiv(min(length, row.context_tokens), columns)
        moved = tokens * row.kv_heads * dims * size
        return Launch(
            name + (" normal" if group == 1 else " grouped"), programs, 8 * sequences - programs,
            tiles, programs * tiles, launched + 1, rows * columns * dims * size,
            moved * heads / row.kv_heads, moved,
        )  # fmt: skip
    rows, columns = _EXTEND_TILES.get(gpu.arch, _EXTEND_TILES[""])[dim]
    blocks, tiles, work = _causal(row.context_tokens, rows, columns)
    sequences = row.batch_size * row.q_heads
    return Launch(
        name, sequences * blocks, 0, tiles, sequences * work, launched, 2 * rows * columns * dims,
        sequences * work * columns * dims * 2,
        tokens * dims * (2 * row.q_heads + row.kv_heads * (2 + size + 3 * (size == 1))),
    )  # fmt: skip


def _vllm(row: Any, gpu: Gpu) -> Launch:
    """vLLM 0.24: tiles of 16 rows and 32 keys; queries and cache in fp8."""
    group, context, sequences = row.q_heads // row.kv_heads, row.context_tokens, row.batch_size
    heads, rows = row.kv_heads, 16 // group
    flops, tile_bytes = 1024 * row.head_dim, 64 * row.head_dim
    grid = (sequences * row.query_tokens // rows + sequences) * heads
    kv_bytes = sequences * context * heads * 2 * row.head_dim
    suffix = f" {row.head_dim} {row.kv_dtype}" + (" g1" if group == 1 else "")
    sequences *= heads
    tiles, work = _cdiv(context, 32), sequences * _cdiv(context, 32)
    if row.query_tokens > 1:
        blocks, tiles, work = _causal(context, rows, 32)
        work *= sequences
        moved = kv_bytes * (2 * group + 6)
        programs, name, splits, asked = sequences * blocks, "vllm prefill", 1, work * tile_bytes
    elif row.batch_size > 128 // heads:
        programs, name, splits, asked, moved = sequences, "vllm 2d", 1, kv_bytes, kv_bytes
    else:
        tiles = _cdiv(context, 16 * 32)
        programs = sequences * _cdiv(context, tiles * 32)
        name, splits, asked, moved = "vllm 3d", 16, kv_bytes, kv_bytes
    empty = splits * grid - programs
    launched = 3 if splits > 1 else 2
    return Launch(name + suffix, programs, empty, tiles, work, launched, flops, asked, moved)


def launches(rows: pd.DataFrame) -> pd.DataFrame:
    """``Launch`` of each row of the table of measured attention."""
    import pandas as pd

    from experiments.kernel_time import ours

    rules = {"sglang": _sglang, "vllm": _vllm, "pagelab": ours.launch}
    table = [rules[row.engine.split()[0]](row, GPUS[row.gpu]) for row in rows.itertuples()]
    return pd.DataFrame(table, index=rows.index, columns=Launch._fields)


@functools.cache
def kernels(arch: str) -> pd.DataFrame:
    """The rows of ``kernels.csv`` for an architecture, by kernel."""
    import pandas as pd

    return pd.read_csv(TABLE, index_col=["arch", "kernel"]).loc[arch]


def microseconds(name: str, launched: pd.DataFrame, constants: Constants) -> np.ndarray:
    """Modelled microseconds of each launch on the GPU ``name``.

    Raises KeyError for a GPU that is not in ``GPUS`` and kernels that were not compiled for it.
    """
    gpu = GPUS[name]
    one, code = launched, kernels(gpu.arch).loc[launched["kernel"]].set_index(launched.index)
    hertz = gpu.ghz * 1e3  # cycles per microsecond
    tile_bytes = one["asked"] / one["work"]
    cold = (one["moved"] / (gpu.l2_mb * 1e6) - 1).clip(0, 1)
    from_memory = (cold * one["moved"] / one["asked"]).clip(upper=1)
    latency = constants.latency_ns * gpu.ghz * (from_memory + (1 - from_memory) * L2_LATENCY)

    resident = np.minimum(one["programs"], code["programs"] * gpu.multiprocessors)
    on_each = np.ceil(resident / gpu.multiprocessors)
    warps = on_each * code["warps"]
    tensor = one["tile_flops"] / (gpu.tflops * 1e3 / gpu.multiprocessors / gpu.ghz)
    others = (warps / 4 - 1).clip(0) * code["instructions"] + (warps - 1) * code["wavefronts"]
    others += (on_each - (4 / code["warps"]).clip(upper=1)).clip(0) * tensor
    alone = code["tile_cycles"] + latency * code["tile_trips"] + tile_bytes / 64
    alone += CROWDING * others + SPILL_CYCLES * warps * code["spills"]
    memory = resident * tile_bytes * from_memory / (gpu.bandwidth * constants.bandwidth * 1e3)
    bounds = alone / hertz, memory, on_each * tensor / hertz
    tile = sum(bound**NORM for bound in bounds) ** (1 / NORM)
    rest = (code["fixed_cycles"] + latency * code["fixed_trips"]) / hertz

    longest = one["items"] * rest + one["tiles"] * tile + one["cycles"] / hertz
    average = (one["programs"] * rest + one["work"] * tile) / resident
    time = longest.where(one["programs"] <= resident, average + TAIL * longest)
    started = (one["programs"] + one["empty"]) / gpu.multiprocessors * DISPATCH_CYCLES / hertz
    return (time + started + LAUNCH_US * (one["launches"] - 2) + constants.floor_us).to_numpy()


def fit(name: str, launched: pd.DataFrame, measured: pd.Series) -> Constants:
    """Constants with the least median of relative errors plus half their 90th percentile."""

    def score(values: tuple[float, ...]) -> float:
        error = np.abs(microseconds(name, launched, Constants(*values)) / measured - 1)
        return float(np.median(error) + np.quantile(error, 0.9) / 2)

    best, step = (score((800, 0.8, 5)), (800, 0.8, 5)), 0.3
    while step > 0.02:
        tries = []
        for place in range(3):
            for factor in (1 + step, 1 / (1 + step)):
                tried = [value * (factor if at == place else 1) for at, value in enumerate(best[1])]
                tried[1] = min(tried[1], 1.0)
                tries.append((score(tried), tuple(tried)))
        best, step = min(best, *tries), step if min(tries) < best else step / 2
    return Constants(*best[1])
