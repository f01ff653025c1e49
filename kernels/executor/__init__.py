"""Compiled kernels without a GPU: execute the PTX that Triton made, and check every access.

    from kernels.executor import execute_ptx

    with execute_ptx("sm_90") as execution:
        paged_decode_attention(q, k_cache, v_cache, block_tables, context_lens)  # CPU tensors

needs a process without TRITON_INTERPRET. The ops run as they are, with their checks, tiles and
split counts for that architecture; the PTX that Triton compiles for it runs thread by thread.
A Fault names the source line of an access out of bounds, a race, a missing wait, fence or barrier,
or an undefined value that is used. An unsupported instruction raises UnknownInstruction;
none is skipped. docs/executor.md lists the checks, their limits, and what is supported.

    ptx.py, targets.py          PTX text to instructions; limits of architectures
    operands.py                 registers; the table of instructions
    arithmetic.py, conversions.py, accesses.py, calls.py, warps.py, matrix.py,
    warpgroup.py, tcgen05.py
                                instructions
    formats.py                  bf16, fp8, tf32; fused multiply-add
    memory.py, global_memory.py, shared_memory.py, tensor_memory.py, in_flight.py
                                memory and what is in flight
    undefined.py                undefined values
    machine.py                  programs, groups of threads, barriers, order
    launch.py, tensors.py, project.py    Triton's launches
    counts.py, faults.py        what a launch did; what is raised
"""

from kernels.executor.counts import Counts
from kernels.executor.faults import Fault, FaultKind, UnknownInstruction
from kernels.executor.launch import Execution, LaunchRecord, execute_ptx, run_ptx
from kernels.executor.targets import MULTIPROCESSORS

__all__ = [
    "MULTIPROCESSORS",
    "Counts",
    "Execution",
    "Fault",
    "FaultKind",
    "LaunchRecord",
    "UnknownInstruction",
    "execute_ptx",
    "run_ptx",
]
