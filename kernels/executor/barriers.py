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

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kernels.executor.faults import FaultKind
from kernels.executor.memory import ASYNCHRONOUS
from kernels.executor.operands import Signal, Step, Translation, Unsupported, instruction

_BYTES = 8
_MAX_FAILED_TESTS = 500
"""Maximum number of successive failed tests. By then every warp has had several turns."""


def first_clocks(num_programs: int, num_warps: int) -> np.ndarray:
    """Clocks [programs, warps, warps + ASYNCHRONOUS] of warps that have met no barrier."""
    clocks = np.zeros((num_programs, num_warps, num_warps + ASYNCHRONOUS), np.int32)
    clocks[:, range(num_warps), range(num_warps)] = 1
    return clocks


class Meeting(NamedTuple):
    """A use of a barrier. size: threads, 0 for all of the program. waits: not barrier.arrive."""

    barrier: int
    size: int
    waits: bool


@dataclass
class _Forming:
    """One barrier of each program of a batch."""

    counts: np.ndarray  # threads that it needs; 0: no thread has reached it
    totals: np.ndarray  # threads that have reached it
    heard: np.ndarray  # clocks of the warps that arrived without waiting


class Barriers:
    """The barriers of the programs of a batch."""

    def __init__(self, batch):
        self._batch = batch
        self._at = np.full(batch.num_threads, -1)  # the barrier that holds the thread
        self.resume = np.zeros(batch.num_threads, np.int64)
        """Where each waiting thread goes on."""
        self._forming: dict[int, _Forming] = {}

    @property
    def idle(self) -> bool:
        """Whether no barrier has been reached by a part of its threads."""
        return not self._forming

    def add(self, mask: np.ndarray, at: int, meeting: Meeting) -> None:
        """Masked threads reach a barrier; those that wait go on at the instruction `at`."""
        batch, arrivals = self._batch, mask.reshape(self._batch.num_programs, -1).sum(1)
        zeros = np.zeros(batch.num_programs, np.int64), np.zeros(batch.num_programs, np.int64)
        heard = np.zeros_like(batch.clocks[:, 0])
        forming = self._forming.setdefault(meeting.barrier, _Forming(*zeros, heard))
        here, count = arrivals > 0, meeting.size or batch.threads_per_program
        other = here & (forming.counts != 0) & (forming.counts != count)
        over = here & ~other & (forming.totals + arrivals > count)
        for wrong, what in ((other, "other threads gave another count"), (over, "more came")):
            detail = f"barrier {meeting.barrier} for {count} threads: {what}"
            batch.refuse(mask & wrong.repeat(len(mask) // len(here)), FaultKind.BARRIER, detail)
        forming.counts[here] = count
        forming.totals += arrivals
        if meeting.waits:
            self._at[mask] = meeting.barrier
            self.resume[mask] = at
            return
        for program, warp in np.argwhere(mask.reshape(len(here), -1, 32).any(2)):
            np.maximum(forming.heard[program], batch.clocks[program, warp],
                       out=forming.heard[program])  # fmt: skip
            batch.clocks[program, warp, warp] += 1

    def lost(self) -> tuple[np.ndarray, str]:
        """(threads that wait at incomplete barriers, words about the first), when all others have
        ended or wait."""
        lost, per_program = np.zeros(len(self._at), np.bool_), self._batch.threads_per_program
        for barrier, forming in self._forming.items():
            lost |= (self._at == barrier) & (forming.totals < forming.counts).repeat(per_program)
        if not lost.any():
            return lost, ""
        first = int(np.argmax(lost))
        barrier, program = int(self._at[first]), first // per_program
        forming = self._forming[barrier]
        total, count = forming.totals[program], forming.counts[program]
        return lost, f"{total} of {count} threads have reached barrier {barrier}"

    def open(self) -> np.ndarray:
        """Open the complete barriers. Returns the threads that go on."""
        batch, passing = self._batch, np.zeros(len(self._at), np.bool_)
        for barrier, forming in [*self._forming.items()]:
            complete = (forming.counts > 0) & (forming.totals == forming.counts)
            threads = (self._at == barrier) & complete.repeat(batch.threads_per_program)
            passing |= threads
            self._at[threads] = -1
            self.meet(threads, forming.heard)
            for array in (forming.counts, forming.totals, forming.heard):
                array[complete] = 0
            if not forming.counts.any():
                del self._forming[barrier]
        return passing

    def meet(self, threads: np.ndarray, heard: np.ndarray | None = None) -> None:
        """Order what the warps of each program have done before what they do next."""
        clocks = self._batch.clocks
        if not self._batch.launch.kernel.partial:
            clocks[threads.reshape(len(clocks), -1)[:, 0]] += 1
            return
        warps: Any = threads.reshape(*clocks.shape[:2], 32).any(2)
        latest = np.where(warps[:, :, None], clocks, 0).max(1)
        latest = latest if heard is None else np.maximum(latest, heard)
        program, warp = np.nonzero(warps)
        clocks[program, warp] = latest[program]
        clocks[program, warp, warp] += 1


@dataclass(eq=False)
class Copy:
    """A bulk copy in flight: what `TensorMap.read` gave, and where the bytes go."""

    thread: int
    chunks: np.ndarray  # [n], in shared memory
    data: np.ndarray  # [n, 16]
    sources: np.ndarray  # [m, 1], in global memory
    size: int  # bytes of a source


@dataclass
class MBarrier:
    """One mbarrier in the shared memory of a program."""

    expected: int
    """Number of arrivals that completes a phase."""
    parity: int = 0
    """Parity of the current phase."""
    arrivals: list[tuple[np.ndarray | None, list | None]] = field(default_factory=list)
    """For each arrival since the last completed phase the clock of its warp, or the products that
    must complete first."""
    num_bytes: int = 0
    """Bytes that the phase expects."""
    copies: list[Copy] = field(default_factory=list)
    """Copies that the phase counts."""
    clock: Any = None
    """What is ordered before the end of the last completed phase."""
    tested: bool = False
    """A thread has tested the phase while only products and copies were pending."""

    @property
    def copied(self) -> int:
        """Bytes that have come, or are on their way."""
        return sum(copy.data.size for copy in self.copies)

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
        arrivals, self.arrivals = self.arrivals[: self.expected], self.arrivals[self.expected :]
        products = [one for _, several in arrivals for one in several or ()]
        if self.copies or any(several is not None for _, several in arrivals):
            self.tested = test and not self.tested
            if self.tested or not test:
                self.arrivals = arrivals + self.arrivals
                return
        clocks = [clock for clock, _ in arrivals if clock is not None]
        if self.clock is not None:
            clocks.append(self.clock)
        if clocks or self.copies:
            self.clock = np.max([np.zeros_like(batch.clocks[0, 0]), *clocks], 0)
        if products:
            batch.tensor_memory.complete(products)
        self._land(batch, address)
        self.parity, self.num_bytes, self.copies = 1 - self.parity, 0, []

    def _land(self, batch, address: int) -> None:
        for copy in self.copies:
            program = copy.thread // batch.threads_per_program
            own = [where for where in batch.columns if where[0] == program]
            number = batch.columns.setdefault((program, address), len(own))
            if number >= ASYNCHRONOUS:
                raise Unsupported(f"more than {ASYNCHRONOUS} mbarriers that count bytes")
            column = batch.clocks.shape[1] + number
            self.clock[column] = next(batch.ticks)
            batch.shared.land_box(batch, copy.thread, copy.chunks, column, self.clock, copy.data)
            batch.memory.end_take(batch, np.full(len(copy.sources), copy.thread), copy.sources,
                                 copy.size)  # fmt: skip


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
                batch.mbarriers[key] = MBarrier(int(counts[0][thread]))
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
            if barrier.parity == phase:
                barrier.settle(batch, at, int(thread), test=True)
            results.append(barrier.parity != phase)
            if results[-1] and barrier.clock is not None:
                own = threads[of_test == len(results) - 1] % batch.threads_per_program
                warps = np.unique(own // 32)
                batch.clocks[program, warps] = np.maximum(
                    batch.clocks[program, warps], barrier.clock
                )
        ended[threads] = np.array(results)[of_test]
        write(batch, mask, ended)
        failed = np.flatnonzero(active & ~ended)
        return fail(batch, failed, addresses, ended.any()) if len(failed) else None

    return try_wait


def fail(batch, threads: np.ndarray, addresses, progress: bool, again: bool = False) -> Signal:
    """Let threads yield their turn because they wait for other threads. Raises Fault if these wait
    too. progress: some of the group go on. again: the instruction is repeated."""
    batch.failed_tests = 0 if progress else batch.failed_tests + 1
    if batch.failed_tests > _MAX_FAILED_TESTS:
        thread = int(threads[0])
        program, detail = thread // batch.threads_per_program, ""
        waited = {at: one for (owner, at), one in batch.mbarriers.items() if owner == program}
        short = [at for at, one in waited.items() if one.copied < one.num_bytes]
        address = short[0] if short else int(addresses[thread])
        if address in waited:
            detail = f": mbarrier at {address:#x}: {waited[address]}"
        detail = f"every warp waits, and no thread can arrive{detail}"
        raise batch.fault(FaultKind.ENDLESS, detail, thread, address=address)
    return Signal("again" if again else "yield", None)


_BARRIERS = ("bar", "barrier", "cta", "sync", "arrive", "aligned")


@instruction("bar", "barrier")
def _bar(translation: Translation) -> Step:
    if translation.instruction.opcode == "bar.warp.sync":
        return lambda batch, mask: batch.whole_warps(mask)
    if not {*translation.parts} <= {*_BARRIERS}:
        raise Unsupported("this form of barrier is not supported")
    waits = translation.one_of(("sync", "arrive")) == "sync"
    try:
        barrier, *count = (int(one, 0) for one in translation.operands)
    except (TypeError, ValueError):
        raise Unsupported("barriers with operands in registers are not supported") from None
    if not 0 <= barrier < 16 or len(count) > 1 or any(one % 32 or one < 32 for one in count):
        raise Unsupported("expected a barrier from 0 to 15, and a multiple of 32 threads")
    meeting = Meeting(barrier, count[0] if count else 0, waits)
    return lambda batch, mask: Signal("barrier", mask, meeting)


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
            return fail(batch, np.flatnonzero(active), np.zeros(batch.num_threads), False, True)
        batch.num_registers = after.reshape(-1)
        return None

    return change
