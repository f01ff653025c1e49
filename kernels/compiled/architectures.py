"""The GPU architectures that kernels are compiled for, and how many programs fit a multiprocessor.

Limits of a multiprocessor are from the CUDA C++ programming guide ("technical specifications per
compute capability"). It has four register files, one per scheduler. A warp's registers come from
one of them in units of 8 per thread.
"""

from dataclasses import dataclass

from triton.backends.compiler import GPUTarget

from kernels.tiles import Target

_WARP_SIZE = 32
_REGISTERS = 65536
"""32 bits each."""
_REGISTER_FILES = 4
_REGISTER_UNIT = 8
_MAX_WARPS = 64
_MAX_PROGRAMS = 32
_RESERVED_BYTES = 1024
"""Shared memory that every program takes on top of its own."""


@dataclass(frozen=True)
class Architecture:
    """A GPU architecture; sizes are per multiprocessor."""

    name: str
    capability: int
    """Compute capability."""
    num_multiprocessors: int
    """The number in its best known data-centre GPU, for default split counts."""
    shared_bytes: int
    tensor_memory_columns: int = 0
    """Columns of tensor memory (tcgen05), 128 x 32 bits each."""

    @property
    def compile_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, _WARP_SIZE)

    @property
    def tiles_target(self) -> Target:
        return Target("cuda", self.capability, self.num_multiprocessors)

    def resident_programs(
        self, *, registers: int, shared_bytes: int, num_warps: int, tensor_memory_columns: int = 0
    ) -> dict[str, int]:
        """Programs that fit one multiprocessor by each resource; the smallest number counts.

        registers: per thread. All other arguments are per program.
        """
        registers_per_warp = max(1, -(-registers // _REGISTER_UNIT)) * _REGISTER_UNIT * _WARP_SIZE
        warps = _REGISTERS // _REGISTER_FILES // registers_per_warp * _REGISTER_FILES
        programs = {
            "warps": _MAX_WARPS // num_warps,
            "programs": _MAX_PROGRAMS,
            "registers": warps // num_warps,
        }
        if shared_bytes:
            programs["shared memory"] = self.shared_bytes // (shared_bytes + _RESERVED_BYTES)
        if tensor_memory_columns:
            programs["tensor memory"] = self.tensor_memory_columns // tensor_memory_columns
        return programs


_ALL = (
    Architecture("sm_80", 80, num_multiprocessors=108, shared_bytes=164 * 1024),
    Architecture("sm_90", 90, num_multiprocessors=132, shared_bytes=228 * 1024),
    Architecture(
        "sm_100", 100, num_multiprocessors=148, shared_bytes=228 * 1024, tensor_memory_columns=512
    ),
)
ARCHITECTURES = {arch.name: arch for arch in _ALL}
