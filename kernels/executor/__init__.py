"""Compiled kernels without a GPU: execute the PTX that Triton made, and check every access.

    from kernels.executor import execute_ptx

    with execute_ptx("sm_90") as execution:
        paged_decode_attention(q, k_cache, v_cache, block_tables, context_lens)  # CPU tensors

needs a process without TRITON_INTERPRET. What runs are the ops as they are: their checks, tiles and
split counts for that architecture, and the PTX that Triton compiles for it, thread by thread, with
tensor-core products, asynchronous copies and barriers. A Fault is raised, at the kernel's source
line, where a kernel leaves its tensors, strays into gaps of a strided one, is misaligned, reads
what nothing wrote, races within a program or between programs, uses an asynchronous copy or product
before its wait or overwrites one, accesses memory before a dependent launch has waited for the one
before it, or comes to a barrier that others never reach. An instruction that is not known raises
UnknownInstruction; none is skipped.

What stays unseen: ptxas and all it does (registers, spills, scheduling, machine code), speed, the
order of accesses that hardware would choose (races are found by barriers and waits, not by trying
orders), races between the threads of one warp, the last bits of approximations (ex2, div.full,
rcp ...) and of tensor-core sums, which are exact here, and Triton itself down to PTX is trusted to
mean the same on a GPU. Semantics are those of the PTX ISA manual, cited in each module, and were
checked against the ops' references, not against a GPU.

Architectures: sm_75 to sm_100; of wgmma and tcgen05 what Triton makes of 16-bit products.

    ptx.py            PTX text to instructions
    operands.py       registers; the table of instructions
    arithmetic.py, logic.py, conversions.py, accesses.py, warps.py, matrix.py, warpgroup.py,
    tcgen05.py, mbarriers.py     instructions, which instructions.py brings together
    formats.py        bf16, fp8, tf32; fused multiply-add
    global_memory.py, shared_memory.py, tensor_memory.py, copies.py, matrix_queue.py
                     memory and what is in flight
    machine.py        programs, groups of threads, barriers, order
    launch.py, tensors.py    Triton's launches
    counts.py         what a launch did, counted
    faults.py         what is raised
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
