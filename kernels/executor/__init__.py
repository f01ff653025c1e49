"""Compiled kernels without a GPU: execute the PTX that Triton made, and check every access.

    with execute_ptx("sm_90") as execution:
        paged_decode_attention(q, k_cache, v_cache, block_tables, context_lens)  # CPU tensors

docs/executor.md lists the checks, their limits and the supported instructions.

    ptx.py, targets.py, operands.py, machine.py   from PTX text to programs that run
    arithmetic.py, conversions.py, accesses.py, calls.py, warps.py, matrix.py, warpgroup.py,
    tcgen05.py, formats.py                        instructions and number formats
    memory.py, *_memory.py, in_flight.py          memory, asynchronous copies and products
    launch.py, tensors.py, project.py             Triton's launches
"""

import os

import numba
import triton

try:
    numba.njit(cache=True)(lambda: None)  # looks for a folder, compiles nothing
except RuntimeError:  # there is none
    os.environ["NUMBA_CACHE_DIR"] = triton.knobs.cache.dir
    numba.config.reload_config()

from kernels.executor.faults import Fault, FaultKind, UnknownInstruction
from kernels.executor.launch import Execution, LaunchRecord, execute_ptx, run_ptx
from kernels.executor.targets import MULTIPROCESSORS

__all__ = [
    "MULTIPROCESSORS", "Execution", "Fault", "FaultKind", "LaunchRecord", "UnknownInstruction",
    "execute_ptx", "run_ptx",
]  # fmt: skip
