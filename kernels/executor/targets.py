"""Limits of each GPU architecture, and the architectures that have each instruction.

Sources: CUDA programming guide, table of compute capabilities; "Target ISA notes" of each
instruction in the PTX ISA. `refusal` covers only instructions that the executor supports.
"""

import functools
import re

MULTIPROCESSORS = {"sm_75": 40, "sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132}
MULTIPROCESSORS |= {"sm_100": 148}
"""Supported architectures, and the number of multiprocessors of a common GPU of each. Default split
counts depend on it."""
SHARED_BYTES = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448}
"""Largest shared memory of a program, in bytes, by compute capability."""
MAX_WARPS = 32
"""Largest number of warps per program (1,024 threads)."""
MAX_GRID = (2**31 - 1, 65535, 65535)
"""Largest number of programs along x, y and z."""

_INTRODUCED = {
    75: r"ldmatrix|mma\.|(tanh|ex2)\..*f(16|32)",
    80: r"cp\.async\.|redux|mbarrier|.*\b(bf16|tf32|bf16x2)\b|(min|max)\.NaN|mma.*k16\..*f16"
    r"|mma.*s8|prefetch|createpolicy",
    89: r"(cvt|mma).*e[45]m[23]",
    90: r"elect|stmatrix|fence\.proxy|griddepcontrol|wgmma|mbarrier\.try_wait|setp.*bf16"
    r"|mbarrier.*expect_tx|cp\.async\.bulk|setmaxnreg"
    r"|(add|sub|mul)\.(\w+\.)*bf16|cvt\.(rn\.)?bf16\.(f16|[su]\d+)|(atom|red).*(bf16|\.v\d)",
    100: r"tcgen05|.*f32x2|(add|sub|fma)\.(\w+\.)*f32\.b?f16|ld.*\.v8|st.*\.v8|redux.*f32",
}
_ONLY = {90: r"wgmma"}
"""Instructions that later architectures do not support."""


def number_of(target: str) -> int:
    """Compute capability of a target: 90 for "sm_90a"."""
    return int(target.removeprefix("sm_").rstrip("af"))


@functools.cache
def refusal(opcode: str, target: str) -> str:
    """Reason why `target` ("sm_80", "sm_90a" ...) lacks an instruction; "" if it has it."""
    number = number_of(target)
    since = max((a for a, pattern in _INTRODUCED.items() if re.match(pattern, opcode)), default=0)
    if number < since:
        return f"needs sm_{since}, but .target is {target}"
    only = next((a for a, pattern in _ONLY.items() if re.match(pattern, opcode)), number)
    return f"only sm_{only}a has it, but .target is {target}" if number // 10 != only // 10 else ""


def check_launch(
    target: str, grid: tuple[int, int, int], num_warps: int, shared_bytes: int
) -> None:
    """Raise ValueError for a launch that exceeds the limits of the target."""
    if not all(1 <= size <= limit for size, limit in zip(grid, MAX_GRID, strict=True)):
        raise ValueError(f"grid: expected 1 to {MAX_GRID} programs along x, y and z, got {grid}")
    if not 1 <= num_warps <= MAX_WARPS:
        raise ValueError(f"num_warps: expected 1 to {MAX_WARPS}, got {num_warps}")
    limit = SHARED_BYTES.get(number_of(target), max(SHARED_BYTES.values()))
    if not 0 <= shared_bytes <= limit:
        raise ValueError(f"shared_bytes: expected at most {limit} on {target}, got {shared_bytes}")
