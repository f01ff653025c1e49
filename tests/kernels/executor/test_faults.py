"""Each kind of fault: a small kernel raises it, and a corrected version does not."""

import pytest
import torch

from kernels.executor import FaultKind, UnknownInstruction

from .conftest import caught

LOAD = "shl.b64 %d11, %d10, 2; add.s64 %d12, %d0, %d11; ld.global.b32 %r1, [%d12+{offset}];"
STORE = "shl.b64 %d11, %d10, 2; add.s64 %d12, %d0, %d11; st.global.b32 [%d12+{offset}], %r0;"
# Shared memory: thread t stores to 4 t and loads from 4 (t ^ 32), where another warp stored.
TO_SHARED = "shl.b32 %r2, %r0, 2; st.shared.b32 [%r2], %r0;"
FROM_OTHER_WARP = "xor.b32 %r3, %r2, 128; ld.shared.b32 %r4, [%r3];"
COPY = (
    "shl.b32 %r2, %r0, 4; shl.b64 %d11, %d10, 4; add.s64 %d12, %d0, %d11;"
    "cp.async.cg.shared.global [%r2], [%d12], 0x10; cp.async.commit_group;"
)


def numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32)


@pytest.mark.parametrize(
    ("offset", "count", "address"),
    [(4, 32, 128), (-4, 32, -4), (0, 31, 124), (1 << 20, 32, 1 << 20)],
    ids=["past the end", "before the start", "one too few", "far away"],
)
@pytest.mark.parametrize("access", [LOAD, STORE])
def test_global_access_outside_its_tensor(run_body, access, offset, count, address):
    """The memory next to the tensor belongs to another tensor of the launch."""
    whole = numbers(96)
    fault = caught(run_body, access.format(offset=offset), whole[32 : 32 + count], whole)
    assert fault.kind is FaultKind.OUT_OF_BOUNDS
    assert (fault.tensor, fault.address) == ("p0", address)
    assert fault.location == "broken.py:7:3"
    assert "broken, program (0, 0, 0)" in str(fault)
    run_body(access.format(offset=0), numbers(32))


def test_thread_and_program_of_a_fault(run_body):
    body = "mov.u32 %r1, %ctaid.y; mad.lo.s32 %r2, %r1, 32, %r0; mul.wide.s32 %d11, %r2, 4;"
    body += "add.s64 %d12, %d0, %d11; ld.global.b32 %r3, [%d12];"
    fault = caught(run_body, body, numbers(75), grid=(1, 3, 1))
    assert (fault.program, fault.thread) == ((0, 2, 0), 11)
    assert fault.instruction == "ld.global.b32 %r3, [%d12]"


@pytest.mark.parametrize("access", [LOAD, STORE, COPY], ids=["load", "store", "copy"])
@pytest.mark.parametrize("seed", [None, 0])
def test_dependent_launch_accesses_memory_before_its_wait(run_body, access, seed):
    options = {"num_warps": 4, "grid": (1, 1, 1), "shared_bytes": 2048, "seed": seed}
    body, wait = access.format(offset=0), "griddepcontrol.wait; "
    only_some = "setp.lt.u32 %p0, %r0, 64; @%p0 " + wait
    run_body(body, numbers(512), **options)
    run_body(wait + body, numbers(512), dependent=True, **options)
    for late in ("", "griddepcontrol.launch_dependents; ", only_some):
        fault = caught(run_body, late + body, numbers(512), dependent=True, **options)
        assert fault.kind is FaultKind.LAUNCH_RACE
        assert late != only_some or fault.thread >= 64
    assert "no griddepcontrol.wait came before" in str(fault)


ROWS = numbers(8 * 6).view(8, 6)[:, :4]
TO_EQUAL = "and.b32 %r1, %r0, 31; shl.b32 %r2, %r1, 2; st.shared.b32 [%r2], HERE;"
BY_PROGRAM = "mov.u32 %r2, %ctaid.x; mul.wide.u32 %d11, %r2, HERE; add.s64 %d12, %d0, %d11;"
GLOBAL_LOAD, GLOBAL_STORE = "ld.global.b32 %r2, [%d12];", "st.global.b32 [%d12], %r0;"
OTHER_LOAD, OTHER_STORE = "ld.global.b32 %r2, [%d14];", "st.global.b32 [%d14], %r0;"
OWN = "mul.wide.u32 %d11, %r0, 4; add.s64 %d12, %d0, %d11;"
OTHER = "xor.b32 %r5, %r0, 32; mul.wide.u32 %d13, %r5, 4; add.s64 %d14, %d0, %d13;"
IN_PLACE = (
    "and.b32 %r6, %r0, 31; mul.wide.u32 %d11, %r6, 4; add.s64 %d12, %d0, %d11;"
    "ld.global.b32 %r2, [%d12]; HERE setp.lt.u32 %p1, %r0, 32; add.s32 %r2, %r2, 1;"
    "@%p1 st.global.b32 [%d12], %r2;"
)
WIDE = "setp.eq.u32 %p1, %r0, 0; @%p1 st.global.v4.b32 [%d0], {%r0, %r0, %r0, %r0};"
BYTE = "setp.eq.u32 %p2, %r0, 40; @%p2 st.global.b8 [%d0+HERE], %r0;"
CONSTANT = "bar.sync 0; ld.globalHERE.b32 %r2, [%d12]; bar.sync 0;"
BARRIER, TWO_WARPS = "bar.sync 0;", {"num_warps": 2, "shared_bytes": 1024}
FORTY = {"grid": (40, 1, 1)}
COPIED = {"shared_bytes": 1024}
SECOND_COPY = COPY.replace("[%r2]", "[%r2+512]")
# Name: (kernel, what to put at HERE, what makes it a fault, kind and words of the fault, options).
# In a seeded order the fault may be of another kind that is named.
FAULTS = {
    "between the rows of a strided view": (
        "shr.u32 %r1, %r0, 2; and.b32 %r2, %r0, 3; mad.lo.s32 %r3, %r1, 6, %r2;"
        "mul.wide.s32 %d11, %r3, 4; add.s64 %d12, %d0, %d11; ld.global.b32 %r4, [%d12+HERE];",
        "0", "4", "OUT_OF_BOUNDS", "between the rows", {"tensor": ROWS},
    ),
    "misaligned": (
        "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d0+HERE];", "16", "8", "MISALIGNED", "", {},
    ),
    "past shared memory": (
        TO_SHARED + "st.shared.b32 [%r2+HERE], %r0;", "896", "900", "OUT_OF_BOUNDS", "", COPIED,
    ),
    "before shared memory": (
        TO_SHARED + "st.shared.b32 [%r2HERE], %r0;", "", "+-4", "OUT_OF_BOUNDS", "", COPIED,
    ),
    "misaligned in shared memory": (
        TO_SHARED + "st.shared.b32 [%r2+HERE], %r0;", "4", "2", "MISALIGNED", "", COPIED,
    ),
    "unwritten shared memory": (
        TO_SHARED + "ld.shared.b32 %r3, [HERE];", "16", "256", "UNWRITTEN", "", COPIED,
    ),
    # With some seeds the other warp has not stored yet: the load reads unwritten memory.
    "load of what another warp stored": (
        TO_SHARED + "HERE" + FROM_OTHER_WARP, BARRIER, "", "SHARED_RACE UNWRITTEN", "", TWO_WARPS,
    ),
    "load after barrier.arrive of another warp": (
        TO_SHARED + "setp.lt.u32 %p1, %r0, 32; HERE" + FROM_OTHER_WARP.replace("ld.", "@!%p1 ld."),
        "@%p1 barrier.cta.arrive 3, 64; @!%p1 barrier.cta.sync 3, 64;", "@%p1 bar.arrive 3, 64;"
        "@!%p1 bar.sync 4, 32;", "SHARED_RACE UNWRITTEN", "", TWO_WARPS,
    ),
    "store after a load of another warp": (
        f"{TO_SHARED} bar.sync 0; {FROM_OTHER_WARP} HERE add.s32 %r5, %r0, 1;"
        "st.shared.b32 [%r2], %r5;",
        BARRIER, "", "SHARED_RACE", "", TWO_WARPS,
    ),
    "different values of two warps": (TO_EQUAL, "%r1", "%r0", "SHARED_RACE", "", TWO_WARPS),
    "store, then load": (
        BY_PROGRAM + GLOBAL_STORE + GLOBAL_LOAD, "4", "0", "GLOBAL_RACE", "program (", FORTY,
    ),
    "load, then store": (
        BY_PROGRAM + GLOBAL_LOAD + GLOBAL_STORE, "4", "0", "GLOBAL_RACE", "", FORTY,
    ),
    "store, then store": (
        BY_PROGRAM + GLOBAL_STORE + GLOBAL_STORE, "4", "0", "GLOBAL_RACE", "program (", FORTY,
    ),
    "read after write": (
        OWN + OTHER + GLOBAL_STORE + "HERE" + OTHER_LOAD,
        BARRIER, "", "GLOBAL_RACE", "of the program", TWO_WARPS,
    ),
    "write after read": (
        OWN + OTHER + OTHER_LOAD + "HERE" + GLOBAL_STORE,
        BARRIER, "", "GLOBAL_RACE", "of the program", TWO_WARPS,
    ),
    "write after write": (
        OWN + OTHER + GLOBAL_STORE + "HERE" + OTHER_STORE,
        BARRIER, "", "GLOBAL_RACE", "of the program", TWO_WARPS,
    ),
    "atomic and plain access": (
        "mov.u32 %r3, %ctaid.x; setp.eq.u32 %p1, %r3, 1; @!%p1 red.global.add.u32 [%d0], 1;"
        "@%p1 ld.global.b32 %r2, [%d0+HERE];",
        "4", "0", "GLOBAL_RACE", "", {"grid": (2, 1, 1)},
    ),
    # One load by two warps and a store by one of them update a tensor in place, in any order.
    "a second load before an update in place": (
        IN_PLACE, "", "ld.global.b32 %r3, [%d12];", "GLOBAL_RACE", "", TWO_WARPS,
    ),
    "constant load after a store": (
        OWN + GLOBAL_STORE + CONSTANT, "", ".nc", "GLOBAL_RACE", "ld.global.nc", {},
    ),
    "store after a constant load": (
        OWN + CONSTANT + GLOBAL_STORE, "", ".nc", "GLOBAL_RACE", "ld.global.nc", {},
    ),
    "narrow store after a wide one": (WIDE + BYTE, "16", "15", "GLOBAL_RACE", "", TWO_WARPS),
    "copy without a wait": (
        COPY + "HERE ld.shared.b32 %r4, [%r2];",
        "cp.async.wait_group 0;", "", "COPY_IN_FLIGHT", "", COPIED,
    ),
    "copy with too weak a wait": (
        COPY + "cp.async.wait_group HERE; ld.shared.b32 %r4, [%r2];",
        "0", "1", "COPY_IN_FLIGHT", "", COPIED,
    ),
    "wait that covers only an older copy": (
        f"{COPY} {SECOND_COPY} cp.async.wait_group 1; ld.shared.b32 %r4, [%r2+HERE];",
        "0", "512", "COPY_IN_FLIGHT", "", COPIED,
    ),
    "copy of another warp": (
        COPY + "cp.async.wait_group 0; HERE xor.b32 %r3, %r2, 512; ld.shared.b32 %r4, [%r3];",
        BARRIER, "", "SHARED_RACE COPY_IN_FLIGHT UNWRITTEN", "", TWO_WARPS,
    ),
    "copy to what another warp reads": (
        "shl.b32 %r5, %r0, 2; st.shared.b32 [%r5], %r0; bar.sync 0; xor.b32 %r6, %r5, 128;"
        "ld.shared.b32 %r7, [%r6]; HERE" + COPY,
        BARRIER, "", "SHARED_RACE COPY_IN_FLIGHT", "", TWO_WARPS,
    ),
    "store into a copy": (
        COPY + "HERE st.shared.b32 [%r2], %r0;",
        "cp.async.wait_all;", "", "COPY_IN_FLIGHT", "", COPIED,
    ),
    "source overwritten during a copy": (
        COPY + "HERE st.global.b32 [%d12], %r0;",
        "cp.async.wait_all;", "", "COPY_IN_FLIGHT", "a copy from it", COPIED,
    ),
    "copy of more than fits": (
        "mov.u32 %r8, HERE;" + COPY.replace("0x10;", "0x10, %r8;") + "cp.async.wait_all;",
        "16", "400", "UNDEFINED", "a src-size of 400 with a cp-size of 16", COPIED,
    ),
    "barrier within a divergent warp": (
        "setp.lt.u32 %p1, %r0, HERE; @%p1 bra SKIP; bar.sync 0; SKIP: mov.u32 %r1, %r0;",
        "32", "7", "DIVERGENCE", "", {},
    ),
    "shuffle from an inactive lane": (
        "setp.gt.u32 %p1, %r0, HERE; @%p1 bra SKIP;"
        "shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1; SKIP: mov.u32 %r2, %r0;",
        "31", "30", "DIVERGENCE", "", {},
    ),
    "ldmatrix in a divergent warp": (
        "shl.b32 %r1, %r0, 4; st.shared.v4.b32 [%r1], {%r0, %r0, %r0, %r0};"
        "setp.lt.u32 %p1, %r0, HERE; @%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1];",
        "32", "16", "DIVERGENCE", "", COPIED,
    ),
    "barrier that a warp never reaches": (
        "setp.lt.u32 %p1, %r0, HERE; @%p1 bra SKIP; bar.sync 0; SKIP: mov.u32 %r1, %r0;",
        "96", "32", "BARRIER", "thread 32, at broken.py:7:3 (bar.sync 0)", {"num_warps": 3},
    ),
    "trap": ("setp.eq.u32 %p1, %r0, HERE; @%p1 trap;", "32", "31", "TRAP", "thread 31", {}),
}  # fmt: skip


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_and_its_correction(run_body, name, seed):
    body, right, wrong, kinds, words, options = FAULTS[name]
    options = {"tensor": numbers(256), "seed": seed, **options}
    tensor = options.pop("tensor")
    run_body(body.replace("HERE", right), tensor, **options)
    fault = caught(run_body, body.replace("HERE", wrong), tensor, **options)
    assert fault.kind.name in (kinds.split() if seed is not None else [kinds.split()[0]])
    assert words in str(fault)


def test_race_through_overlapping_tensors(run_body):
    whole = numbers(64)
    body = (
        "mov.u32 %r2, %ctaid.x; setp.eq.s32 %p1, %r2, 0;"
        "@%p1 st.global.b32 [%d0], %r0; @!%p1 ld.global.b32 %r1, [%d1];"
    )
    run_body(body, whole[:32], whole[32:], grid=(2, 1, 1))
    fault = caught(run_body, body, whole[:32], whole[:8], grid=(2, 1, 1))
    assert fault.kind is FaultKind.GLOBAL_RACE


class TestAtomicInstructions:
    def test_several_programs_update_one_element(self, run_body):
        tensor = torch.zeros(2, dtype=torch.int32)
        body = "atom.global.gpu.relaxed.add.u32 %r2, [%d0], 1; red.global.max.u32 [%d0+4], %r0;"
        run_body(body, tensor, grid=(5, 1, 1), num_warps=2)
        assert tensor.tolist() == [5 * 64, 63]

    def test_compare_and_swap(self, run_body):
        """One thread reads the 0. The others read the value that it stored."""
        tensor, out = torch.zeros(1, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
        body = "add.s32 %r3, %r0, 7; atom.global.cas.b32 %r2, [%d0], 0, %r3;"
        body += "mul.wide.u32 %d11, %r0, 4; add.s64 %d12, %d1, %d11; st.global.b32 [%d12], %r2;"
        run_body(body, tensor, out)
        assert (tensor.item(), out.tolist()) == (7, [0] + [7] * 31)

    @pytest.mark.parametrize(("acquire", "release"), [(True, True), (True, False), (False, True)])
    def test_a_lock_needs_acquire_and_release(self, run_body, acquire, release):
        body = """
        setp.ne.u32 %p1, %r0, 0; @%p1 bra DONE;
        AGAIN: atom.global.gpu.ACQUIRE.cas.b32 %r2, [%d1], 0, 1;
        setp.ne.u32 %p2, %r2, 0; @%p2 bra AGAIN;
        ld.global.b32 %r3, [%d0]; add.s32 %r3, %r3, 1; st.global.b32 [%d0], %r3;
        atom.global.gpu.RELEASE.exch.b32 %r4, [%d1], 0;
        DONE: mov.u32 %r5, %r0;
        """.replace("ACQUIRE", "acquire" if acquire else "relaxed")
        body = body.replace("RELEASE", "release" if release else "relaxed")
        counted, lock = torch.zeros(2, 1, dtype=torch.int32)
        if acquire and release:
            run_body(body, counted, lock, grid=(6, 1, 1))
            assert (counted.item(), lock.item()) == (6, 0)
        else:
            fault = caught(run_body, body, counted, lock, grid=(6, 1, 1))
            assert fault.kind is FaultKind.GLOBAL_RACE


UNDEFINED = {
    "nothing wrote the register": "setp.lt.u32 %p1, %r0, 9; @%p1 mov.u32 %r2, 1;",
    "division by zero at broken.py:7:3": "max.u32 %r3, %r0, 8; sub.s32 %r3, %r3, 8;"
    "div.u32 %r2, 40, %r3; setp.gt.u32 %p1, %r0, 8;",
    "a shift of 32 bits by 54 at broken.py:7:3": "add.s32 %r3, %r0, 23; shl.b32 %r2, 1, %r3;"
    "setp.lt.u32 %p1, %r0, 9;",
}
"""Instructions that leave %r2 undefined, except in threads where %p1 is true; by reason."""


class TestUndefinedValues:
    @pytest.mark.parametrize("why", UNDEFINED)
    @pytest.mark.parametrize(
        "use",
        ["st.global.b32 [%d12], %r4;",
         "red.global.add.u32 [%d0], %r4;",
         "setp.gt.s32 %p2, %r4, 0; @%p2 bra DONE;",
         "and.b32 %r5, %r4, 12; cvt.u64.u32 %d13, %r5; add.s64 %d14, %d0, %d13;"
         "ld.global.b32 %r6, [%d14];"],
        ids=["store", "atomic", "condition", "address"],
    )  # fmt: skip
    def test_use_is_a_fault(self, run_body, why, use):
        """Also through other registers; but not if a mask excludes the undefined threads."""
        body = UNDEFINED[why] + OWN + "mov.b32 {%h1, %h2}, %r2; mov.b32 %r4, {%h1, %h2};{mask}"
        body += use + "DONE: mov.u32 %r9, %r0;"
        mask = "@!%p1 mov.u32 %r4, 0;"
        run_body(body.replace("{mask}", mask), numbers(64))
        fault = caught(run_body, body.replace("{mask}", ""), numbers(64))
        assert fault.kind is FaultKind.UNDEFINED
        assert why in str(fault)

    @pytest.mark.parametrize("why", UNDEFINED)
    @pytest.mark.parametrize(
        "choice",
        ["selp.b32 %r4, %r2, 7, %p1;",
         "selp.b32 %r5, -1, 0, %p1; and.b32 %r4, %r2, %r5;",
         "mov.b32 {%h1, %h2}, %r2; mov.b32 %r6, {%h3, %h1}; mov.b32 %r6, {%h4, %h3};"
         "mov.b32 {%h5, %h6}, %r6; sub.u16 %h7, %h6, %h6; cvt.u32.u16 %r4, %h7;",
         "@%p1 setp.eq.u32 %p5, %r0, %r0; not.pred %p6, %p5; @!%p1 mov.pred %p6, 0;"
         "selp.b32 %r4, 1, 2, %p6;"],
        ids=["selection", "mask", "half", "negated predicate"],
    )  # fmt: skip
    def test_an_unused_value_is_no_fault(self, run_body, why, choice):
        run_body(UNDEFINED[why] + OWN + choice + "st.global.b32 [%d12], %r4;", numbers(32))


def test_bytes_beyond_src_size_are_zero(run_body):
    out, given = torch.full((64,), -1, dtype=torch.int32), numbers(128) + 1
    body = (
        "setp.lt.u32 %p1, %r0, 8; selp.b32 %r8, 8, 0, %p1;"
        + COPY.replace("0x10;", "0x10, %r8;")
        + "cp.async.wait_all; ld.shared.b32 %r3, [%r2+4]; ld.shared.b32 %r4, [%r2+8];"
        "shl.b64 %d13, %d10, 3; add.s64 %d14, %d1, %d13; st.global.v2.b32 [%d14], {%r3, %r4};"
    )
    run_body(body, given[:32], out, shared_bytes=512)
    expected = torch.zeros(32, 2, dtype=torch.int32)
    expected[:8, 0] = given[:32].view(8, 4)[:, 1]
    assert torch.equal(out.view(32, 2), expected)


class TestControlFlow:
    @pytest.mark.parametrize(
        "text",
        ["shfl.sync.idx.b32 %r1, %r0, 0, 31, MASK;", "redux.sync.add.s32 %r1, %r0, MASK;",
         "elect.sync %r1|%p2, MASK;", "vote.sync.ballot.b32 %r1, %p1, MASK;"],
        ids=["shfl", "redux", "elect", "vote"],
    )  # fmt: skip
    def test_member_mask_that_is_not_the_active_mask(self, run_body, text):
        """An active thread is no member, or a member is inactive."""
        body = "setp.lt.u32 %p1, %r0, 16; @%p1 " + text
        run_body(body.replace("MASK", "0xffff"), numbers(1))
        for mask in ("0x7fff", "0x1ffff", "-1"):
            fault = caught(run_body, body.replace("MASK", mask), numbers(1))
            assert fault.kind is FaultKind.DIVERGENCE
            assert "the member mask is" in str(fault)

    def test_endless_loop(self, run_body, monkeypatch):
        monkeypatch.setattr("kernels.executor.machine.MAX_INSTRUCTIONS", 1000)
        assert caught(run_body, "AGAIN: bra AGAIN;", numbers(1)).kind is FaultKind.ENDLESS

    @pytest.mark.parametrize("seed", [None, 0, 1, 2])
    def test_divergent_loop_reconverges(self, run_body, seed):
        """Thread t counts to t % 5. Then the lanes exchange their counts."""
        out = torch.zeros(64, dtype=torch.int32)
        body = (
            "rem.u32 %r1, %r0, 5; mov.u32 %r2, 0;"
            "AGAIN: setp.ge.u32 %p1, %r2, %r1; @%p1 bra DONE; add.s32 %r2, %r2, 1; bra.uni AGAIN;"
            "DONE: bar.sync 0; shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1; shl.b64 %d11, %d10, 2;"
            "add.s64 %d12, %d0, %d11; st.global.b32 [%d12], %r3;"
        )
        run_body(body, out, num_warps=2, seed=seed)
        assert out.tolist() == [(thread ^ 1) % 5 for thread in range(64)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tcgen05.mma.cta_group::2.kind::f16 [ %r1 + 0 ], %d1, %d2, %r2, %p1;", "tcgen05.mma"),
        ("tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r2}, [%r1 + 0];", "tcgen05.ld"),
        ("tcgen05.st.sync.aligned.32x32b.x2.b32 [%r1 + 0], {%r2};", "the operands do not fit"),
        ("mbarrier.arrive.shared.b64 %d1, [%r1];", "mbarrier.arrive"),
        ("atom.shared::cluster.add.u32 %r1, [%r0], 1;", ".shared::cluster is not supported"),
        ("add.sat.s32 %r1, %r0, 1;", ".sat is not supported"),
        ("mov.u32 %r1, %clock;", "special register %clock"),
        ("bar.sync %r1, 64;", "barriers with operands in registers"),
        ("setmaxnreg.inc.sync.aligned.u32 100;", "expected a multiple of 8 registers"),
        ("cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%d1, {%r1}], [%r2];", "bulk"),
        ("cvt.rn.f16.s64 %r1, %d0;", "cvt.rn.f16.s64"),
        ("wgmma.fence.sync.aligned;", "only sm_90a has it, but .target is sm_100a"),
    ],
)
def test_unsupported_instruction_is_named(run_body, text, why):
    """The error comes before anything is executed."""
    tensor = numbers(32)
    body = STORE.format(offset=0).replace("%r0", "%r7") + text
    with pytest.raises(UnknownInstruction, match=r"broken.py:7:3") as raised:
        run_body(body, tensor)
    assert why in str(raised.value)
    assert torch.equal(tensor, numbers(32))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"grid": (1, 65536, 1)}, r"grid: .*got \(1, 65536, 1\)"),
        ({"grid": (1, 0, 1)}, r"grid: .*got \(1, 0, 1\)"),
        ({"num_warps": 33}, "num_warps: expected 1 to 32, got 33"),
        ({"shared_bytes": 166913, "target": "sm_80"}, "at most 166912 on sm_80, got 166913"),
    ],
)
def test_launch_beyond_the_limits_of_the_target(run_body, options, why):
    with pytest.raises(ValueError, match=why):
        run_body("mov.u32 %r1, %r0;", numbers(1), **options)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("cp.async.commit_group;", "sm_80"),
        ("elect.sync %r1|%p1, -1;", "sm_90"),
        ("cvt.rn.satfinite.e4m3x2.f32 %h1, %r2, %r1;", "sm_89"),
        ("mul.bf16 %h1, %h2, %h3;", "sm_90"),
        ("tcgen05.wait::ld.sync.aligned;", "sm_100a"),
    ],
)
def test_instruction_newer_than_the_target(run_body, text, target):
    before = {"sm_80": "sm_75", "sm_89": "sm_86", "sm_90": "sm_89", "sm_100a": "sm_90a"}[target]
    body = "mov.b32 %r1, 0; mov.b32 %r2, 0; mov.b16 %h2, 0; mov.b16 %h3, 0;" + text
    run_body(body, numbers(1), target=target)
    with pytest.raises(UnknownInstruction, match=rf"needs {target[:6].rstrip('a')}.* {before}"):
        run_body(body, numbers(1), target=before)
