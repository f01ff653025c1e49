"""The GPU architectures that kernels are compiled for, and how many programs fit a multiprocessor.

Limits of a multiprocessor are from the CUDA C++ programming guide ("technical specifications per
compute capability"). For gfx942, where the multiprocessor is a compute unit, they are from AMD's
CDNA 3 ISA guide and LLVM's AMDGPU back end. Both kinds have four register files, one per scheduler;
a warp's registers come from one of them in units of 8 per thread.
"""

from dataclasses import dataclass

from triton.backends.compiler import GPUTarget

from kernels.tiles import Target

_REGISTER_FILES = 4
_REGISTER_UNIT = 8


@dataclass(frozen=True)
class Architecture:
    """A GPU architecture; sizes are per multiprocessor."""

    name: str
    backend: str
    """"cuda" or "hip"."""
    version: int | str
    """Compute capability as an integer, or gfx name."""
    num_multiprocessors: int
    """The number in its best known data-centre GPU, for default split counts."""
    shared_bytes: int
    shared_bytes_reserved: int = 1024
    """Taken by every program on top of its own."""
    registers: int = 65536
    """32 bits each."""
    max_warps: int = 64
    max_programs: int = 32
    warp_size: int = 32
    tensor_memory_columns: int = 0
    """Columns of tensor memory (tcgen05), 128 x 32 bits each."""

    @property
    def compile_target(self) -> GPUTarget:
        return GPUTarget(self.backend, self.version, self.warp_size)

    @property
    def tiles_target(self) -> Target:
        return Target(self.backend, self.version, self.num_multiprocessors)

    def resident_programs(
        self, *, registers: int, shared_bytes: int, num_warps: int, tensor_memory_columns: int = 0
    ) -> dict[str, int]:
        """Programs that fit one multiprocessor by each resource; the smallest number counts.

        registers: per thread. All other arguments are per program.
        """
        registers_per_warp = max(1, -(-registers // _REGISTER_UNIT)) * _REGISTER_UNIT
        registers_per_warp *= self.warp_size
        warps = self.registers // _REGISTER_FILES // registers_per_warp * _REGISTER_FILES
        programs = {
            "warps": self.max_warps // num_warps,
            "programs": self.max_programs,
            "registers": warps // num_warps,
        }
        if shared_bytes:
            shared_bytes += self.shared_bytes_reserved
            programs["shared memory"] = self.shared_bytes // shared_bytes
        if tensor_memory_columns:
            programs["tensor memory"] = self.tensor_memory_columns // tensor_memory_columns
        return programs


ARCHITECTURES = {
    arch.name: arch
    for arch in (
        Architecture("sm_80", "cuda", 80, num_multiprocessors=108, shared_bytes=164 * 1024),
        Architecture("sm_90", "cuda", 90, num_multiprocessors=132, shared_bytes=228 * 1024),
        Architecture(
            "sm_100", "cuda", 100, num_multiprocessors=148, shared_bytes=228 * 1024,
            tensor_memory_columns=512,
        ),
        Architecture(
            "gfx942", "hip", "gfx942", num_multiprocessors=304, shared_bytes=64 * 1024,
            shared_bytes_reserved=0, registers=131072, max_warps=32, max_programs=16, warp_size=64,
        ),
    )
}  # fmt: skip
