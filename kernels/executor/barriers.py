"""Barriers, mbarriers, and the accesses that they order (PTX ISA 9.7.13).

Each warp has a clock, a row of int32. Column u holds the last epoch of warp u that is ordered
before what the warp does now; its own column holds its own epoch. An access in an epoch of warp u
comes before an access of warp w if column u of w's clock has reached that epoch. Barriers and the
waits for mbarriers take the maximum of clocks. ASYNCHRONOUS more columns hold the phases of the
mbarriers that count bytes: the copies of a phase write in that epoch of their mbarrier's column.

bar.sync and barrier.sync hold threads until as many threads of the program as their count have
reached the barrier; barrier.arrive only counts. A thread that has ended never reaches it.

mbarriers in shared memory count arrivals and bytes (9.7.13.15). mbarrier.init sets the count. A
phase completes when its pending count is zero and as many bytes have come as were expected; then
the next phase begins. Copies (tma.py) and the products of a tcgen05.commit may take any time, so
such a phase completes when a thread tests it for the second time. bar.sync must separate
mbarrier.init from uses by other threads, and these uses from mbarrier.inval.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernels.executor.faults import FaultKind
from kernels.executor.memory import ASYNCHRONOUS
from kernels.executor.operands import Signal, Step, Translation, Unsupported, instruction

_BYTES, _NUM_BARRIERS = 8, 16
_MAX_FAILED_TESTS = 500
"""Maximum number of successive failed tests. By then every warp has had several turns."""


def first_clocks(num_programs: int, num_warps: int) -> np.ndarray:
    """Clocks [programs, warps, warps + ASYNCHRONOUS] of warps that have met no barrier."""
    clocks = np.zeros((num_programs, num_warps, num_warps + ASYNCHRONOUS), np.int32)
    clocks[:, range(num_warps), range(num_warps)] = 1
    return clocks


class Barriers:
    """The barriers of the programs of a batch."""

    def __init__(self, batch):
        self._batch, (programs, _, columns) = batch, batch.clocks.shape
        self._programs = np.repeat(np.arange(programs), batch.threads_per_program)
        self._at = np.full(batch.num_threads, -1)  # the barrier that holds each thread
        self.resume = np.zeros(batch.num_threads, np.int64)
        """Where each of these threads goes on."""
        self._counts = np.zeros((programs, _NUM_BARRIERS), np.int64)  # threads needed; 0: none came
        self._totals = np.zeros((programs, _NUM_BARRIERS), np.int64)  # threads that came
        self._heard = np.zeros((programs, _NUM_BARRIERS, columns), np.int32)  # by barrier.arrive

    @property
    def idle(self) -> bool:
        """Whether no barrier has been reached by a part of its threads."""
        return not self._counts.any()

    def add(self, mask: np.ndarray, at: int, barrier: int, count: int, waits: bool) -> None:
        """Masked threads reach a barrier; those that wait go on at the instruction `at`."""
        by_warp: Any = mask.reshape(len(self._counts), -1, 32)
        counts, totals = self._counts[:, barrier], self._totals[:, barrier]
        arrivals = by_warp.sum((1, 2))
        wrong = (counts != count) & (counts != 0) | (totals + arrivals > count)
        threads = mask & wrong.repeat(len(mask) // len(wrong))
        detail = f"barrier {barrier}: others gave another count than {count}, or more came"
        self._batch.refuse(threads, FaultKind.BARRIER, detail)
        counts[arrivals > 0] = count
        totals += arrivals
        if waits:
            self._at[mask], self.resume[mask] = barrier, at
            return
        clocks = self._batch.clocks
        for program, warp in np.argwhere(by_warp.any(2)):
            heard = self._heard[program, barrier]
            heard[:] = np.maximum(heard, clocks[program, warp])
            clocks[program, warp, warp] += 1

    def states(self, program: int) -> list[str]:
        """Words about the barriers that a part of their threads have reached."""
        total, count = self._totals[program], self._counts[program]
        return [f"{total[i]} of {count[i]} threads at barrier {i}" for i in np.flatnonzero(count)]

    def check_end(self) -> None:
        """Raise Fault if a thread waits for others, when all have ended or wait."""
        missing = (self._totals < self._counts)[self._programs, self._at] & (self._at >= 0)
        if missing.any():
            thread = int(np.argmax(missing))
            detail = "; ".join(self.states(self._programs[thread]))
            self._batch.at = int(self.resume[thread]) - 1
            raise self._batch.fault(FaultKind.BARRIER, detail, thread)

    def open(self) -> np.ndarray:
        """Open the complete barriers. Returns the threads that go on."""
        complete = (self._counts > 0) & (self._totals == self._counts)
        passing = complete[self._programs, self._at] & (self._at >= 0)
        for barrier in np.flatnonzero(complete.any(0)):
            self.meet(passing & (self._at == barrier), self._heard[:, barrier])
        self._at[passing] = -1
        for array in (self._counts, self._totals, self._heard):
            array[complete] = 0
        return passing

    def meet(self, threads: np.ndarray, heard: np.ndarray | int = 0) -> None:
        """Order what the warps of each program have done before what they do next."""
        clocks = self._batch.clocks
        if not self._batch.launch.kernel.partial:
            clocks[threads.reshape(len(clocks), -1)[:, 0]] += 1
            return
        warps: Any = threads.reshape(*clocks.shape[:2], 32).any(2)
        latest = np.maximum(np.where(warps[:, :, None], clocks, 0).max(1), heard)
        program, warp = np.nonzero(warps)
        clocks[program, warp] = latest[program]
        clocks[program, warp, warp] += 1


@dataclass
class MBarrier:
    """One mbarrier in the shared memory of a program."""

    expected: int  # arrivals that complete a phase
    column: int  # of clocks, for the copies that it counts
    phase: int = 0  # completed phases
    arrivals: list[tuple[np.ndarray | None, list | None]] = field(default_factory=list)
    """For each arrival since the last completed phase the clock of its warp, or the products that
    must complete first."""
    num_bytes: int = 0  # that the phase expects
    copied: int = 0  # bytes that have come, or are on their way
    copies: list[Callable] = field(default_factory=list)
    """For each copy of the phase a function (column, clock) that ends it."""
    clock: Any = None  # what is ordered before the end of the last completed phase
    tested: bool = False  # while only products and copies were pending

    def __str__(self):
        arrived = f"{len(self.arrivals)} of {self.expected} arrivals"
        return f"{arrived} and {self.copied} of {self.num_bytes} expected bytes have come"

    def settle(self, batch, address: int, thread: int, test: bool = False) -> None:
        """Complete the phase if nothing is pending. The first test while only products and copies
        are pending does not, to catch a thread that tests once without a loop."""
        if len(self.arrivals) < self.expected or self.copied < self.num_bytes:
            return
        if self.copied > self.num_bytes:
            detail = f"mbarrier at {address:#x} of shared memory: {self}"
            raise batch.fault(FaultKind.BARRIER, detail, thread, address=address)
        arrivals = self.arrivals[: self.expected]
        if self.copies or any(products is not None for _, products in arrivals):
            self.tested = test and not self.tested
            if self.tested or not test:
                return
        clocks = [clock for clock, _ in [*arrivals, (self.clock, None)] if clock is not None]
        if clocks:
            self.clock = np.max(clocks, 0)
        products = [one for _, products in arrivals for one in products or ()]
        if products:
            batch.tensor_memory.complete(products)
        self.phase += 1
        if self.copies:
            if self.column >= batch.clocks.shape[2]:
                raise Unsupported(f"more than {ASYNCHRONOUS} mbarriers that count bytes")
            self.clock[self.column] = self.phase
        for land in self.copies:
            land(self.column, self.clock)
        self.arrivals, self.copies = self.arrivals[self.expected :], []
        self.num_bytes = self.copied = 0


def touch(batch, addresses: np.ndarray, mask: np.ndarray) -> None:
    """Check that the masked threads may use mbarriers at these addresses. Raises Fault if another
    warp has initialised one since the last barrier."""
    batch.shared.load(batch, addresses, mask, _BYTES)


def find(batch, address: int, thread: int) -> MBarrier:
    """The mbarrier at this address of the thread's program. Raises Fault if there is none."""
    found = batch.mbarriers.get((thread // batch.threads_per_program, address))
    if found is None:
        detail = f"no mbarrier at {address:#x} of shared memory"
        raise batch.fault(FaultKind.BARRIER, detail, thread, address=address)
    return found


@instruction("mbarrier")
def _mbarrier(translation: Translation) -> Step:
    ignored = ("cta", "shared", "shared::cta", "acquire", "release", "relaxed")
    form = ".".join(part for part in translation.parts[1:] if part not in ignored)
    if form in ("init.b64", "inval.b64"):
        return _init_or_inval(translation)
    if form in ("try_wait.parity.b64", "test_wait.parity.b64"):
        return _try_wait(translation)
    if form not in ("arrive.b64", "arrive.expect_tx.b64", "expect_tx.b64"):
        raise Unsupported("this form of mbarrier is not supported")
    return _arrive(translation, "arrive" in form, "expect_tx" in form)


def _init_or_inval(translation: Translation) -> Step:
    """Make an mbarrier that expects a count of arrivals, or (inval, no count) remove it."""
    barrier, *count = translation.operands
    address, reads = translation.address(barrier), [translation.read(one, "u32") for one in count]

    def step(batch, mask):
        mask, addresses = batch.every(mask), address(batch)
        batch.shared.store(batch, addresses, mask, np.zeros((len(mask), _BYTES), np.uint8))
        counts = [batch.full(read(batch)) for read in reads]
        for thread in map(int, np.flatnonzero(mask)):
            key = thread // batch.threads_per_program, int(addresses[thread])
            if counts:
                column = batch.clocks.shape[1] + batch.num_mbarriers[key[0]]
                batch.mbarriers[key] = MBarrier(int(counts[0][thread]), column)
                batch.num_mbarriers[key[0]] += 1
            else:
                find(batch, key[1], thread)
                del batch.mbarriers[key]

    return step


def _arrive(translation: Translation, arrives: bool, expects: bool) -> Step:
    """Expect more bytes in the current phase, and arrive with a release of the warp's accesses."""
    operands = [*translation.operands]
    if arrives and operands.pop(0) != "_":
        raise Unsupported("an mbarrier.arrive that returns a state is not supported")
    address = translation.address(operands[0])
    reads = [translation.read(one, "u32") for one in operands[1:]]
    if len(reads) > 1 or (expects and not reads):
        raise Unsupported("these operands of mbarrier are not supported")

    def arrive(batch, mask):
        active, addresses = batch.every(mask), address(batch)
        touch(batch, addresses, active)
        numbers = batch.full(reads[0](batch)) if reads else np.ones(batch.num_threads, np.int64)
        for thread in map(int, np.flatnonzero(active)):
            at, program = int(addresses[thread]), thread // batch.threads_per_program
            barrier, warp = find(batch, at, thread), thread % batch.threads_per_program // 32
            barrier.num_bytes += expects * int(numbers[thread])
            if arrives:
                clock = batch.clocks[program, warp].copy()
                barrier.arrivals += [(clock, None)] * (1 if expects else int(numbers[thread]))
                batch.clocks[program, warp, warp] += 1
                barrier.settle(batch, at, thread)

    return arrive


def _try_wait(translation: Translation) -> Step:
    """Test whether the phase with this parity has completed, without blocking. A thread whose test
    fails yields its turn."""
    target, where, parity, *_hint = translation.operands
    write, address = translation.write(target, "pred"), translation.address(where)
    read = translation.read(parity, "u32")

    def try_wait(batch, mask):
        active, addresses, parities = batch.every(mask), address(batch), batch.full(read(batch))
        touch(batch, addresses, active)
        ended, threads = np.zeros(batch.num_threads, np.bool_), np.flatnonzero(active)
        programs = threads // batch.threads_per_program
        tests = np.stack([programs, addresses[threads], parities[threads]], 1).astype(np.int64)
        tests, first, of_test = np.unique(tests, axis=0, return_index=True, return_inverse=True)
        results = []
        for (program, at, phase), thread in zip(tests.tolist(), threads[first], strict=True):
            barrier = find(batch, at, int(thread))
            if barrier.phase % 2 == phase:
                barrier.settle(batch, at, int(thread), test=True)
            results.append(barrier.phase % 2 != phase)
            if results[-1] and barrier.clock is not None:
                own = threads[of_test == len(results) - 1] % batch.threads_per_program // 32
                batch.clocks[program, own] = np.maximum(batch.clocks[program, own], barrier.clock)
        ended[threads] = np.array(results)[of_test]
        write(batch, mask, ended)
        failed = np.flatnonzero(active & ~ended)
        return fail(batch, failed, ended.any()) if len(failed) else None

    return try_wait


def fail(batch, threads: np.ndarray, progress: bool, again: bool = False) -> Signal:
    """Let threads yield their turn because they wait for other threads. Raises Fault if these wait
    too. progress: some of the group go on. again: the instruction is repeated."""
    batch.failed_tests = 0 if progress else batch.failed_tests + 1
    if batch.failed_tests > _MAX_FAILED_TESTS:
        program = int(threads[0]) // batch.threads_per_program
        detail = ["every warp waits, and no thread can arrive", *batch.barriers.states(program)]
        for (owner, at), one in batch.mbarriers.items():
            if owner == program and (one.arrivals or one.num_bytes):
                detail.append(f"mbarrier at {at:#x}: {one}")
        raise batch.fault(FaultKind.ENDLESS, "; ".join(detail), int(threads[0]))
    return Signal("again" if again else "yield", None)


@instruction("bar", "barrier")
def _bar(translation: Translation) -> Step:
    if translation.instruction.opcode == "bar.warp.sync":
        return lambda batch, mask: batch.whole_warps(mask)
    translation.expect("cta", "sync", "arrive")
    waits = translation.one_of(("sync", "arrive")) == "sync"
    try:
        barrier, count, *rest = *(int(one, 0) for one in translation.operands), 0
    except (TypeError, ValueError):
        raise Unsupported("barriers with operands in registers are not supported") from None
    if not 0 <= barrier < _NUM_BARRIERS or len(rest) > 1 or count % 32:
        raise Unsupported("expected a barrier from 0 to 15, and a multiple of 32 threads")
    return lambda batch, mask: Signal("barrier", mask, (barrier, count, waits))


@instruction("setmaxnreg")
def _setmaxnreg(translation: Translation) -> Step:
    """A warp group changes its number of registers (9.7.19.5). inc waits until the program has as
    many; it begins with .maxnreg registers for each thread."""
    up, count = translation.one_of(("inc", "dec")) == "inc", int(translation.operands[0], 0)
    translation.expect("inc", "dec", "sync", "aligned")
    if count % 8 or not 24 <= count <= 256:
        raise Unsupported("expected a multiple of 8 registers from 24 to 256")
    pool = translation.program.max_registers

    def change(batch, mask):
        active = batch.every(mask)
        batch.whole_warps(active, 128)
        wrong = active & (batch.num_registers > count if up else batch.num_registers < count)
        have = "more" if up else "fewer"
        batch.refuse(wrong & (pool > 0), FaultKind.UNDEFINED, f"the warp has {have} registers")
        after = np.where(active, count, batch.num_registers).reshape(batch.num_programs, -1)
        if up and pool and (after.sum(1) > pool * batch.threads_per_program).any():
            return fail(batch, np.flatnonzero(active), False, again=True)
        batch.num_registers = after.reshape(-1)
        return None

    return change
