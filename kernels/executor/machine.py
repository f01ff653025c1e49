"""Programs that run: threads, control flow, barriers, and the order in which warps take turns.

A batch holds several programs of a launch. An instruction runs at once for all threads that have
reached it. Threads that branch apart form groups. Two groups at the same instruction are merged.
The group that is furthest behind runs first, but a group whose test of an mbarrier failed runs
after all others. With a seed, random warps of a group (warp groups, for wgmma) run in random turns,
and programs enter batches in random order. The result of a correct kernel does not depend on the
order. Most faults are found in any order, because the checks look for missing barriers and waits.
"""

import functools
import random
from collections.abc import Sequence

import numpy as np

from kernels.executor import (  # noqa: F401  (these enter their instructions in the table)
    accesses,
    arithmetic,
    barriers,
    calls,
    conversions,
    matrix,
    tcgen05,
    warpgroup,
    warps,
)
from kernels.executor.barriers import Barriers, MBarrier, first_clocks
from kernels.executor.faults import Fault, FaultKind, UnknownInstruction
from kernels.executor.in_flight import CopyQueue, MatrixQueue
from kernels.executor.memory import CheckedMemory
from kernels.executor.operands import UNSIGNED, Signal, Unsupported, translate
from kernels.executor.ptx import Program, Register, parse
from kernels.executor.shared_memory import SharedMemory
from kernels.executor.tensor_memory import TensorMemory
from kernels.executor.undefined import alternate, following

MAX_THREADS = 2048
"""Threads per batch. More threads share the cost of a step, but registers must fit in the cache."""
MAX_INSTRUCTIONS = 4_000_000
"""Maximum number of instructions per batch, so an endless loop becomes a fault within minutes."""

_EVERYWHERE = np.ones(1, np.bool_)


class Kernel:
    """A kernel ready to run: its program, and each instruction as a function."""

    def __init__(self, ptx: str):
        """Raises UnknownInstruction where the program has one."""
        self.program: Program = parse(ptx)
        self.steps = []
        """(function, registers that it uses, function for undefined values) by instruction."""
        for one in self.program.instructions:
            step, effects = translate(self.program, one)
            self.steps.append((step, *following(step, one, effects)))
        # All bits of an unwritten register are 1, which is a NaN and no valid address.
        self.registers = [
            np.ones(1, np.bool_) if width == 1 else np.full(1, 2**width - 1, UNSIGNED[width])
            for width in self.program.widths
        ]
        self.alternates = {
            index: (alternate(width), "nothing wrote the register", _EVERYWHERE)
            for index, width in enumerate(self.program.widths)
        }
        """See Batch."""
        groups = any(one.parts[0] in ("wgmma", "setmaxnreg") for one in self.program.instructions)
        self.threads_in_step = 128 if groups else 32
        """Threads whose turns come together: a warp, or the warp group that wgmma takes whole."""
        self.one_by_one = any(
            one.parts[0] in ("atom", "red") and "global" in one.parts
            for one in self.program.instructions
        )
        """Whether a program may wait for another one (a lock)."""
        self.partial = any(
            one.opcode.startswith("cp.async.bulk")
            or one.opcode.startswith("mbarrier.arrive")
            or (one.parts[0] in ("bar", "barrier") and one.operands not in ((), ("0",), ("0x0",)))
            for one in self.program.instructions
        )
        """Whether barriers may hold part of a program's warps."""


class Batch:
    """Programs of a launch that run together.

    Attributes that instructions use: num_threads; registers; alternates (another value, reason and
    threads of each register that is undefined in some threads); undefined (registers that are
    undefined in threads of the running group); left_of (arrays of threads without this group, see
    undefined.py); special (registers by name); memory, shared, local, copies, products, mbarriers,
    tensor_memory; program_of_thread (index in the launch); running (threads that have not ended);
    early (threads that must not access global memory yet); at and mask (the instruction that runs
    and the threads that stand at it); failed_tests (successive turns that a failed test of an
    mbarrier has ended).
    """

    def __init__(self, launch, programs: Sequence[int], rng: random.Random | None):
        self.launch, self._rng = launch, rng
        self.threads_per_program = 32 * launch.num_warps
        self.programs, self.num_programs = programs, len(programs)
        self.num_threads = self.num_programs * self.threads_per_program
        self.memory = launch.memory
        self.clocks = first_clocks(self.num_programs, launch.num_warps)
        sizes = launch.shared_bytes, self.threads_per_program
        self.shared = SharedMemory(self.clocks, *sizes, partial=launch.kernel.partial)
        self.copies = CopyQueue(self)
        self.products = MatrixQueue(self)
        self.barriers = Barriers(self)
        self.mbarriers: dict[tuple[int, int], MBarrier] = {}
        self.num_mbarriers = [0] * self.num_programs
        self.num_registers = np.full(self.num_threads, launch.kernel.program.max_registers)
        self.program_of_thread = np.repeat(np.array(programs, np.int32), self.threads_per_program)
        self.registers = [*launch.kernel.registers]
        self.alternates = dict(launch.kernel.alternates)
        self._undefined_in = {id(_EVERYWHERE): (_EVERYWHERE, {*self.alternates})}
        """By its id, an array of threads and the registers that are undefined in them."""
        self.undefined: set[int] = set()
        self.special = self._special_registers(programs)
        self.running = np.ones(self.num_threads, np.bool_)
        self.early = np.full(self.num_threads, launch.dependent)
        self._groups: dict[int, np.ndarray] = {}  # threads that stand at an instruction
        self._yielded: dict[int, int] = {}  # when a group at this instruction has yielded
        self._num_yields = self._warp_instructions = 0
        self.failed_tests = 0
        self.at = 0
        self.mask: np.ndarray | None = None

    def _special_registers(self, programs: Sequence[int]) -> dict[str, np.ndarray]:
        threads, grid = self.threads_per_program, self.launch.grid
        special = {
            f"%{name}.{axis}": np.full(1, value, np.uint32)
            for name, values in (("tid", (0, 0, 0)), ("ntid", (threads, 1, 1)), ("nctaid", grid))
            for axis, value in zip("xyz", values, strict=True)
        }
        special["%tid.x"] = np.tile(np.arange(threads, dtype=np.uint32), self.num_programs)
        special["%laneid"] = np.arange(self.num_threads, dtype=np.uint32) % np.uint32(32)
        warp = np.repeat(np.arange(threads // 32, dtype=np.uint32), 32)
        special["%warpid"] = np.tile(warp, self.num_programs)
        where = np.array([self.launch.coordinates(program) for program in programs], np.uint32)
        for axis, column in zip("xyz", where.T, strict=True):
            same = (column == column[0]).all()
            special[f"%ctaid.{axis}"] = column[:1] if same else np.repeat(column, threads)
        return special

    # -- what instructions need

    @functools.cached_property
    def tensor_memory(self) -> TensorMemory:
        return TensorMemory(self)

    @functools.cached_property
    def local(self) -> SharedMemory:
        """Local memory of each thread, with the checks of shared memory."""
        local_bytes = self.launch.kernel.program.local_bytes
        return SharedMemory(first_clocks(self.num_threads, 1), local_bytes, 1, "local")

    def memory_of(self, space: str) -> CheckedMemory:
        """Memory of a state space: "global", "shared" or "local"."""
        return self.memory if space == "global" else getattr(self, space)

    def full(self, array: np.ndarray) -> np.ndarray:
        """A register's array with one element per thread."""
        if len(array) == self.num_threads:
            return np.ascontiguousarray(array)
        return np.full(self.num_threads, array[0])

    def every(self, mask: np.ndarray | None) -> np.ndarray:
        """A mask as an array."""
        return self.running if mask is None else mask

    def whole_warps(self, mask: np.ndarray | None, size: int = 32) -> None:
        """Raise Fault if a mask holds part of a warp or, of size 128, of a warp group."""
        if mask is None:
            return
        by_warp = mask.reshape(-1, size)
        lacking = by_warp.any(1, keepdims=True) & ~by_warp
        detail = f"a thread of the warp{' group' * (size > 32)} does not take part"
        self.refuse(lacking.reshape(-1), FaultKind.DIVERGENCE, detail)

    def refuse(self, threads: np.ndarray, kind: FaultKind, detail: str) -> None:
        """Raise the fault of the first of these threads, if there is one."""
        if threads.any():
            raise self.fault(kind, detail, int(np.argmax(threads)))

    def fault(
        self, kind: FaultKind, detail: str, thread: int, *, address=None, tensor=None
    ) -> Fault:
        """The fault of the instruction that runs now; thread: index in the batch."""
        program = self.launch.kernel.program
        one = program.instructions[self.at]
        return Fault(
            kind, detail, kernel=program.name, thread=thread % self.threads_per_program,
            program=self.launch.coordinates(int(self.program_of_thread[thread])),
            location=one.location, instruction=one.text, address=address, tensor=tensor,
        )  # fmt: skip

    def set_alternate(self, index: int, values: np.ndarray, why: str, where: np.ndarray) -> None:
        """Mark a register as undefined in the threads `where`, an array to be shared."""
        self.alternates[index] = values, why, where
        self._undefined_in.setdefault(id(where), (where, set()))[1].add(index)

    def forget(self, index: int) -> None:
        """Mark a register as defined."""
        self.undefined.discard(index)
        if entry := self.alternates.pop(index, None):
            registers = self._undefined_in[id(entry[2])][1]
            registers.remove(index)
            if not registers:
                del self._undefined_in[id(entry[2])]

    def undefine(self, register: Register | str, threads: np.ndarray, why: str) -> None:
        """Mark the values that these threads have just written to `register` as undefined."""
        if threads.any() and isinstance(register, Register):
            location = self.launch.kernel.program.instructions[self.at].location
            values = np.where(threads, alternate(register.width), self.registers[register.index])
            self.forget(register.index)
            self.set_alternate(register.index, values, f"{why} at {location}", threads)
            self.undefined.add(register.index)

    # -- control

    def run(self) -> int:
        """Run until every thread has ended. Returns the warp instructions. Raises Fault."""
        self._join(0, self.running)
        executed = 0
        while True:
            while self._groups:
                yields = self._num_yields
                executed += self._run_group(*self._next_group())
                if self._num_yields == yields:
                    self.failed_tests = 0
                if executed > MAX_INSTRUCTIONS:
                    thread = int(np.argmax(self.running))
                    detail = f"{MAX_INSTRUCTIONS} instructions and no end"
                    raise self.fault(FaultKind.ENDLESS, detail, thread)
            if self.barriers.idle:
                return self._warp_instructions
            self.barriers.check_end()
            self._open_barriers()
            if not self._groups:  # only barrier.arrive reached the others
                return self._warp_instructions

    def _next_group(self) -> tuple[int, np.ndarray, int]:
        """(instruction, threads, instructions to run at most) of the group whose turn it is."""
        order = sorted(self._groups, key=lambda at: (self._yielded.get(at, 0), at))
        if self._rng is None:
            at = order[0]
            self._yielded.pop(at, None)
            return at, self._groups.pop(at), MAX_INSTRUCTIONS
        size = self.launch.kernel.threads_in_step
        ready, passed = {}, np.zeros(self.num_threads // size, np.bool_)
        for at in order:  # of those in step, the threads that are furthest behind
            here = self._groups[at].reshape(-1, size).any(1)
            if (here & ~passed).any():
                ready[at] = here & ~passed
            passed |= here
        at = self._rng.choice(list(ready))
        there = np.flatnonzero(ready[at])
        chosen = [warp for warp in there if self._rng.random() < 0.5] or [self._rng.choice(there)]
        by_warp = self._groups.pop(at).reshape(-1, size)
        part = np.zeros_like(by_warp)
        part[chosen] = by_warp[chosen]
        self._join(at, (by_warp & ~part).reshape(-1))
        if at not in self._groups:
            self._yielded.pop(at, None)
        return at, part.reshape(-1), self._rng.randrange(1, 400)

    def _join(self, at: int, mask: np.ndarray) -> None:
        """Threads come to instruction `at`."""
        if mask.any():
            self._groups[at] = mask | self._groups[at] if at in self._groups else mask

    def _run_group(self, at: int, threads: np.ndarray, budget: int) -> int:
        """Run a group until it branches apart, waits, ends, meets another or has had its turn."""
        steps, groups = self.launch.kernel.steps, self._groups
        num_warps = int(threads.reshape(-1, 32).any(1).sum())
        programs = self.running.reshape(self.num_programs, -1)
        whole = (programs == programs[:, :1]).all() and (threads == self.running).all()
        self.mask = mask = None if whole else threads
        here = [found for where, found in self._undefined_in.values() if (where & threads).any()]
        self.undefined = undefined = set().union(*here)
        self.left_of: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        program, done, first = self.launch.kernel.program, 0, at
        while True:
            self.at = at
            step, concerned, followed = steps[at]
            try:
                signal = (step if undefined.isdisjoint(concerned) else followed)(self, mask)
            except Unsupported as why:
                one = program.instructions[at]
                raise UnknownInstruction(program.name, one.text, one.location, str(why)) from None
            at += 1
            if signal is None and at not in groups and done + at - first < budget:
                continue
            self._warp_instructions += num_warps * (at - first)
            done += at - first
            goes_on = at if signal is None else self._follow(signal, at, mask)
            if goes_on is None:
                return done
            first = at = goes_on
            if done >= budget or at in groups:
                self._join(at, self.every(mask))
                return done

    def _follow(self, signal: Signal, at: int, mask: np.ndarray | None) -> int | None:
        """The next instruction of a group that stands before `at`, or None if it does not go on as
        a whole."""
        if signal.kind == "barrier":
            return at if self._arrive(at, mask, signal.mask, *signal.target) else None
        here = self.every(mask)
        there = here if signal.mask is None else signal.mask
        if signal.kind in ("yield", "again"):
            at -= signal.kind == "again"
            self._num_yields += 1
            self._yielded[at] = self._num_yields
            self._join(at, here)
            return None
        if signal.kind == "exit":
            self.running = self.running & ~there
        else:
            target = self.launch.kernel.program.labels[signal.target]
            if there is here:
                return target
            self._join(target, there)
        self._join(at, here & ~there)
        return None

    def _arrive(self, at: int, mask, waiting, barrier: int, count: int, waits: bool) -> bool:
        """A group reaches a barrier. If predicated, only threads in `waiting` do. Returns whether
        the whole group goes on at once. count, waits: see `Signal`."""
        self.whole_warps(waiting)
        count = count or self.threads_per_program
        all_meet = waits and count == self.threads_per_program and mask is None and waiting is None
        if all_meet and self.barriers.idle:
            self.barriers.meet(self.running)
            return True
        here = self.every(mask)
        waiting = here if waiting is None else waiting
        self.barriers.add(waiting, at, barrier, count, waits)
        self._join(at, here & ~waiting if waits else here)
        if self.launch.kernel.partial or self._rng is not None:
            self._open_barriers()
        return False

    def _open_barriers(self) -> None:
        """Let the threads of complete barriers go on. Without a seed, programs that always meet as
        a whole wait until no group can run, and then continue together."""
        passing = self.barriers.open()
        for at in np.unique(self.barriers.resume[passing]):
            self._join(int(at), passing & (self.barriers.resume == at))
