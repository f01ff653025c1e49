"""mbarrier: barriers in shared memory that count arrivals (PTX ISA 9.7.13.15).

A phase completes when its pending count reaches zero; then the next phase begins. mbarrier.init
sets the count. tcgen05.commit is the only supported arrival. Its products may take any time, so it
arrives when a thread tests the phase for the second time.

bar.sync must separate mbarrier.init from uses by other threads, and these uses from mbarrier.inval.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kernels.executor.faults import FaultKind
from kernels.executor.operands import Signal, Step, Translation, Unsupported, instruction
from kernels.executor.tensor_memory import Product

_BYTES = 8
_MAX_FAILED_TESTS = 500
"""Turns in succession that only tested, in vain: by then every warp has had several."""


@dataclass
class MBarrier:
    """One mbarrier in the shared memory of a program."""

    expected: int
    """Number of arrivals that completes a phase."""
    parity: int = 0
    """Parity of the current phase."""
    arrivals: list[list[Product]] = field(default_factory=list)
    """For each arrival since the last completed phase, the products that must complete first."""
    tested: bool = False
    """A thread has tested the phase while only products were pending."""

    def ended(self, phase: int, completed: list[Product]) -> bool:
        """Whether the phase with this parity has completed, which completes products. The first
        test while only products are pending returns False, to catch a thread that tests once
        without a loop."""
        if self.parity == phase and len(self.arrivals) >= self.expected:
            if self.tested:
                completed += [
                    one for products in self.arrivals[: self.expected] for one in products
                ]
                del self.arrivals[: self.expected]
                self.parity = 1 - self.parity
            self.tested = not self.tested
        return self.parity != phase


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
    opcode = translation.instruction.opcode.replace("shared::cta", "shared")
    forms = {
        "mbarrier.init.shared.b64": _init_or_inval,
        "mbarrier.inval.shared.b64": _init_or_inval,
        "mbarrier.try_wait.parity.shared.b64": _try_wait,
    }
    if opcode not in forms:
        raise Unsupported("this form of mbarrier is not supported")
    return forms[opcode](translation)


def _init_or_inval(translation: Translation) -> Step:
    """Make an mbarrier that expects a count of arrivals, or (inval, no count) remove it."""
    place, *count = translation.operands
    address, reads = translation.address(place), [translation.read(one, "u32") for one in count]

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


def _try_wait(translation: Translation) -> Step:
    """Test whether the phase with this parity has completed, without blocking. Where it has not,
    other threads take their turns first."""
    target, place, parity = translation.operands
    write, address = translation.write(target, "pred"), translation.address(place)
    read = translation.read(parity, "u32")

    def try_wait(batch, mask):
        active, addresses, parities = batch.every(mask), address(batch), batch.full(read(batch))
        touch(batch, addresses, active)
        ended, completed = np.zeros(batch.num_threads, np.bool_), []
        threads = np.flatnonzero(active)
        tests = np.stack(
            [threads // batch.threads_per_program, addresses[threads], parities[threads]], 1
        )
        tests, first, of_test = np.unique(
            tests.astype(np.int64), axis=0, return_index=True, return_inverse=True
        )
        results = [
            find(batch, at, int(threads[place])).ended(phase, completed)
            for (_, at, phase), place in zip(tests.tolist(), first, strict=True)
        ]
        ended[threads] = np.array(results)[of_test]
        batch.tensor_memory.complete(completed)
        write(batch, mask, ended)
        failed = np.flatnonzero(active & ~ended)
        batch.failed_tests = 0 if ended.any() else batch.failed_tests + 1
        if batch.failed_tests > _MAX_FAILED_TESTS:
            thread, detail = int(failed[0]), "every warp waits, and no thread can arrive"
            raise batch.fault(FaultKind.ENDLESS, detail, thread, address=int(addresses[thread]))
        return Signal("yield", None) if len(failed) else None

    return try_wait
