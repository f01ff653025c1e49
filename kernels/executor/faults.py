"""Exceptions: faults of a kernel, and instructions that the executor does not support."""

import enum


class FaultKind(enum.Enum):
    """Kinds of faults. The value is the beginning of the message."""

    OUT_OF_BOUNDS = "access out of bounds"
    MISALIGNED = "misaligned access"
    UNWRITTEN = "read of memory that nothing wrote"
    SHARED_RACE = "race in shared memory"
    TENSOR_RACE = "race in tensor memory"
    GLOBAL_RACE = "race in global memory"
    LAUNCH_RACE = "race with the launch before"
    COPY_IN_FLIGHT = "asynchronous copy in flight"
    MATRIX_IN_FLIGHT = "asynchronous matrix product in flight"
    FENCE = "missing fence"
    BARRIER = "barrier that not all threads reach"
    DIVERGENCE = "warp instruction without the whole warp"
    UNDEFINED = "undefined result"
    TRAP = "trap"
    ENDLESS = "endless execution"


class Fault(Exception):
    """The kernel did something that a GPU forbids or leaves undefined.

    Attributes:
        kind: FaultKind.
        kernel: name of the kernel.
        program: (x, y, z) of the program, as `tl.program_id` gives them.
        thread: index of the (first) thread within its program.
        location: source line, "file.py:line:column"; for an inlined function the call site follows
            after "@".
        instruction: text of the PTX instruction.
        address: byte offset from the start of `tensor`, or in shared memory; lane << 16 | column
            in tensor memory. None without a memory access.
        tensor: name of the kernel argument that is accessed. None outside global memory.
    """

    def __init__(
        self, kind: FaultKind, detail: str, *,
        kernel: str, program: tuple[int, int, int], thread: int,
        location: str, instruction: str,
        address: int | None = None, tensor: str | None = None,
    ):  # fmt: skip
        self.kind, self.kernel, self.program, self.thread = kind, kernel, program, thread
        self.location, self.instruction = location, instruction
        self.address, self.tensor = address, tensor
        super().__init__(
            f"{kind.value}: {detail}; {kernel}, program {program}, thread {thread}, "
            f"at {location or 'an unknown line'} ({instruction})"
        )


class UnknownInstruction(NotImplementedError):
    """The kernel has an instruction that the executor does not support. Nothing was executed.

    Attributes: instruction (PTX text), location (source line).
    """

    def __init__(self, kernel: str, instruction: str, location: str, why: str = ""):
        self.instruction, self.location = instruction, location
        super().__init__(
            f"{kernel}: the executor does not support the instruction {instruction!r} at "
            f"{location or 'an unknown line'}{': ' + why if why else ''}"
        )
