"""The one table of tile shapes, warps, pipeline stages and split counts.

Choices depend on shapes, dtypes and the architecture only, never on the batch or on device values:
the same sequence is always computed with the same tiles, which batch invariance rests on.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from kernels.primitives import INTERPRETED


@dataclass(frozen=True)
class Target:
    """What the table needs to know of a device."""

    backend: str
    """"cuda", "hip" or "interpreter"."""
    arch: int | str
    """Compute capability as an integer (90 for sm_90), or gfx name on hip."""
    num_multiprocessors: int


@functools.lru_cache(maxsize=64)
def _cuda_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        return Target("hip", arch, properties.multi_processor_count)
    return Target(
        "cuda", properties.major * 10 + properties.minor, properties.multi_processor_count
    )


INTERPRETER = Target("interpreter", 0, 1)


def target_of(device: torch.device) -> Target:
    """The target that kernels on tensors of `device` are built for."""
    if INTERPRETED.value:
        return INTERPRETER
    return _cuda_target(device.index)


def padded_dim(head_dim: int) -> int:
    """head_dim rounded up to a size that a tile can have: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(head_dim))


@dataclass(frozen=True)
class RowTile:
    """Tile of a memory-bound kernel that moves rows of head_dim elements."""

    rows: int
    num_warps: int


def store_tile(head_dim_padded: int) -> RowTile:
    """About 4096 elements per program: four 16-byte loads (fp16) of K and of V per thread."""
    return RowTile(rows=max(1, 4096 // head_dim_padded), num_warps=4)
