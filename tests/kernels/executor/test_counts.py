"""Counts of small kernels, compared with counts made by hand."""

from __future__ import annotations

import pytest
import torch

ADDRESS = "mul.wide.u32 %d11, %r0, {stride}; add.s64 %d12, %d0, %d11;"


def memory(num_bytes: int) -> torch.Tensor:
    """A tensor of bytes. Kernels see its storage aligned to a 128-byte line, as on a GPU."""
    return torch.zeros(num_bytes, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("access", "stride", "sectors", "lines"),
    [
        ("ld.global.b32 %r1, [%d12];", 4, 4, 1),
        ("ld.global.b32 %r1, [%d12];", 0, 1, 1),
        ("ld.global.b32 %r1, [%d12];", 8, 8, 2),
        ("ld.global.b32 %r1, [%d12];", 128, 32, 32),
        ("ld.global.b32 %r1, [%d12+16];", 4, 5, 2),
        ("ld.global.b8 %r1, [%d12];", 1, 1, 1),
        ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d12];", 16, 16, 4),
        ("st.global.v2.b32 [%d12], {%r0, %r0};", 8, 8, 2),
    ],
)
def test_sectors_and_lines(run_body, access, stride, sectors, lines):
    counts = run_body(ADDRESS.format(stride=stride) + access, memory(128 * 32))
    assert (counts.requests, counts.sectors, counts.lines) == (1, sectors, lines)
    assert (counts.distinct_lines, counts.l2_bytes) == (lines, 32 * sectors)


@pytest.mark.parametrize("skipped", [0, 64, 128, 200])
def test_lines_do_not_depend_on_host_addresses(run_body, skipped):
    """Only the offset of a view in its storage determines the number of lines."""
    # Shifts the host address of the next allocation.
    held = [torch.zeros(size, dtype=torch.uint8) for size in (48, 80, 200)]
    view = torch.zeros(1024, dtype=torch.uint8)[skipped : skipped + 128]
    counts = run_body(ADDRESS.format(stride=4) + "ld.global.b32 %r1, [%d12];", view)
    lines = 1 if skipped % 128 == 0 else 2
    assert (counts.lines, counts.distinct_lines, len(held)) == (lines, lines, 3)
    assert counts.distinct_bytes == 128


def test_masked_threads_and_programs(run_body):
    """Three programs with two warps each read the same 8 numbers."""
    body = "and.b32 %r2, %r0, 31; setp.lt.u32 %p1, %r2, 8; mul.wide.u32 %d11, %r2, 4;"
    body += "add.s64 %d12, %d0, %d11; @%p1 ld.global.b32 %r1, [%d12];"
    counts = run_body(body, memory(128), grid=(3, 1, 1), num_warps=2)
    assert (counts.requests, counts.sectors, counts.lines) == (6, 6, 6)
    assert (counts.read_bytes, counts.distinct_lines) == (6 * 32, 1)
    assert counts.instructions["global load"] == 6
    assert counts.sectors_per_request == 1.0


@pytest.mark.parametrize(
    ("access", "stride", "wavefronts", "conflicts"),
    [
        ("st.shared.b32 [%r2], %r0;", 4, 1, 0),
        ("st.shared.b32 [%r2], %r0;", 8, 2, 1),
        ("st.shared.b32 [%r2], %r0;", 128, 32, 31),
        ("st.shared.b32 [%r2], %r0;", 132, 1, 0),
        ("st.shared.b16 [%r2], %h0;", 2, 1, 0),
        ("st.shared.v2.b32 [%r2], {%r0, %r1};", 8, 2, 0),
        ("st.shared.v4.b32 [%r2], {%r0, %r1, %r0, %r1};", 16, 4, 0),
        ("st.shared.v4.b32 [%r2], {%r0, %r1, %r0, %r1};", 32, 8, 4),
    ],
)
def test_wavefronts_and_bank_conflicts(run_body, access, stride, wavefronts, conflicts):
    body = f"mul.lo.s32 %r2, %r0, {stride}; {access}"
    counts = run_body(body, memory(4), shared_bytes=132 * 32)
    assert (counts.wavefronts, counts.bank_conflicts) == (wavefronts, conflicts)


def test_broadcast_of_one_word_has_no_bank_conflict(run_body):
    body = "st.shared.b32 [0], %r5; ld.shared.b32 %r1, [0];"
    counts = run_body(body, memory(4), shared_bytes=4)
    assert (counts.wavefronts, counts.bank_conflicts) == (2, 0)


@pytest.mark.parametrize(("row", "wavefronts"), [(16, 4), (128, 32), (144, 4)])
def test_ldmatrix(run_body, row, wavefronts):
    """The eight rows of a matrix are in different banks, in the same banks, or padded apart."""
    fill = f"mul.lo.s32 %r2, %r0, {row}; st.shared.v4.b32 [%r2], {{%r0, %r0, %r0, %r0}};"
    body = fill + "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r3, %r4, %r5, %r6}, [%r2];"
    counts = run_body(body, memory(4), shared_bytes=144 * 32)
    assert counts.wavefronts == 2 * wavefronts


def test_classes_tensor_operations_and_barriers(run_body):
    body = """
    mov.b32 %r1, 0; bar.sync 0; add.s32 %r2, %r1, 1; bar.sync 0;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
      {%r4, %r5, %r6, %r7}, {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%r1, %r1, %r1, %r1};
    add.f32 %r8, %r4, %r5; cvt.rn.f16.f32 %h1, %r8;
    """
    counts = run_body(body, memory(4), num_warps=3)
    assert counts.tensor_operations == 3 * 2 * 16 * 8 * 16
    assert counts.barriers == 3 * 2
    expected = {"tensor core": 3, "synchronisation": 6, "floating point": 3, "integer": 3}
    expected |= {"move": 6, "conversion": 6, "control": 3, "parameter": 3}
    assert counts.instructions == expected


def test_counts_of_each_program(run_body):
    """Program x runs x iterations. Each adds 7 instructions, one line and two wavefronts."""
    body = """
    mov.u32 %r1, %ctaid.x;
    TOP:
    setp.eq.u32 %p1, %r1, 0; @%p1 bra END;
    sub.s32 %r1, %r1, 1; ld.global.b32 %r2, [%d0]; st.shared.v2.b32 [%r3], {%r0, %r0};
    mul.lo.s32 %r3, %r0, 8; bra TOP;
    END:
    """.replace("TOP", "$L_TOP").replace("END", "$L_END")
    body = body.replace("mov.u32 %r1, %ctaid.x;", "mov.u32 %r1, %ctaid.x; mul.lo.s32 %r3, %r0, 8;")
    counts = run_body(body, memory(4), grid=(4, 1, 1), num_warps=1, shared_bytes=256)
    for loops, program in enumerate(counts.programs):
        assert program.lines == loops
        assert program.wavefronts == 2 * loops
        assert program.instructions == counts.programs[0].instructions + 7 * loops
        assert program.tensor_operations == 0
    assert sum(program.instructions for program in counts.programs) == counts.total


def test_bytes_in_flight(run_body):
    """Each of 64 threads issues three 16-byte copies and waits for the first before the third."""
    copy = "cp.async.cg.shared.global [%r2{place}], [%d0], 16; cp.async.commit_group;"
    body = "mul.lo.s32 %r2, %r0, 16;" + copy.format(place="") + copy.format(place="+1024")
    body += "cp.async.wait_group 1;" + copy.format(place="+2048") + "cp.async.wait_all;"
    counts = run_body(body, memory(16), num_warps=2, grid=(2, 1, 1), shared_bytes=3072)
    assert counts.bytes_in_flight == 2 * 64 * 16


def test_special_functions_are_counted_per_thread(run_body):
    body = (
        "mov.b32 %r1, 0; mov.b32 %r3, 0; ex2.approx.ftz.f32 %r2, %r1; div.full.f32 %r3, %r1, %r1;"
        "ex2.approx.f16x2 %r4, %r1; div.rn.f32 %r5, %r1, %r1;"
    )
    counts = run_body(body, memory(4), num_warps=2, grid=(3, 1, 1))
    assert counts.special_functions == 3 * 2 * 32 * 4
    assert [program.special_functions for program in counts.programs] == [2 * 32 * 4] * 3
