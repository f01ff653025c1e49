"""Counts of small kernels, compared with counts made by hand."""

import pytest
import torch

ADDRESS = "mul.wide.u32 %d11, %r0, {stride}; add.s64 %d12, %d0, %d11;"


def memory(num_bytes: int) -> torch.Tensor:
    """A tensor of bytes. Kernels see its storage aligned to a 128-byte line, as on a GPU."""
    return torch.zeros(num_bytes, dtype=torch.uint8)


def of_global_access(access: str, stride: int, sectors: int, lines: int):
    expected = {"requests": 1, "sectors": sectors, "lines": lines, "distinct_lines": lines}
    body = ADDRESS.format(stride=stride) + access
    return body, {}, expected | {"sectors_per_request": sectors}


def of_shared_access(access: str, stride: int, wavefronts: int, conflicts: int):
    body, expected = f"mul.lo.s32 %r2, %r0, {stride};" + access, (wavefronts, conflicts)
    names = "wavefronts", "bank_conflicts"
    return body, {"shared_bytes": 144 * 32}, dict(zip(names, expected, strict=True))


STORE_TWO = "st.shared.v2.b32 [%r2], {%r0, %r1};"
STORE_FOUR = "st.shared.v4.b32 [%r2], {%r0, %r1, %r0, %r1};"
LDMATRIX = STORE_FOUR + "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r3, %r4, %r5, %r6}, [%r2];"
COPY = "cp.async.cg.shared.global [%r2+{}], [%d0], 16; cp.async.commit_group;"
# Name: (kernel, options of the launch, counts).
COUNTS = {
    "consecutive words": of_global_access("ld.global.b32 %r1, [%d12];", 4, 4, 1),
    "one word": of_global_access("ld.global.b32 %r1, [%d12];", 0, 1, 1),
    "every second word": of_global_access("ld.global.b32 %r1, [%d12];", 8, 8, 2),
    "a word of each line": of_global_access("ld.global.b32 %r1, [%d12];", 128, 32, 32),
    "words across two lines": of_global_access("ld.global.b32 %r1, [%d12+16];", 4, 5, 2),
    "bytes": of_global_access("ld.global.b8 %r1, [%d12];", 1, 1, 1),
    "16 bytes": of_global_access("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d12];", 16, 16, 4),
    "stores": of_global_access("st.global.v2.b32 [%d12], {%r0, %r0};", 8, 8, 2),
    "the same 8 numbers for two warps of three programs": (
        "and.b32 %r2, %r0, 31; setp.lt.u32 %p1, %r2, 8; mul.wide.u32 %d11, %r2, 4;"
        "add.s64 %d12, %d0, %d11; @%p1 ld.global.b32 %r1, [%d12];",
        {"grid": (3, 1, 1), "num_warps": 2},
        {"requests": 6, "sectors": 6, "lines": 6, "read_bytes": 6 * 32, "distinct_lines": 1},
    ),
    "all banks": of_shared_access("st.shared.b32 [%r2], %r0;", 4, 1, 0),
    "every second bank": of_shared_access("st.shared.b32 [%r2], %r0;", 8, 2, 1),
    "one bank": of_shared_access("st.shared.b32 [%r2], %r0;", 128, 32, 31),
    "padded apart": of_shared_access("st.shared.b32 [%r2], %r0;", 132, 1, 0),
    "one word of shared memory": of_shared_access("st.shared.b32 [0], %r5;", 0, 1, 0),
    "halves of a word": of_shared_access("st.shared.b16 [%r2], %h0;", 2, 1, 0),
    "8 bytes of shared memory": of_shared_access(STORE_TWO, 8, 2, 0),
    "16 bytes of shared memory": of_shared_access(STORE_FOUR, 16, 4, 0),
    "every other 16 bytes": of_shared_access(STORE_FOUR, 32, 8, 4),
    # The rows of a matrix are in different banks, in the same banks, or padded apart.
    "ldmatrix": of_shared_access(LDMATRIX, 16, 2 * 4, 0),
    "ldmatrix in the same banks": of_shared_access(LDMATRIX, 128, 2 * 32, 2 * 28),
    "ldmatrix, padded": of_shared_access(LDMATRIX, 144, 2 * 4, 0),
    # 64 threads issue three copies and wait for the first before the third.
    "copies in flight": (
        "mul.lo.s32 %r2, %r0, 16;" + COPY.format(0) + COPY.format(1024)
        + "cp.async.wait_group 1;" + COPY.format(2048) + "cp.async.wait_all;",
        {"num_warps": 2, "grid": (2, 1, 1), "shared_bytes": 3072},
        {"bytes_in_flight": 2 * 64 * 16},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_counts(run_body, name):
    body, options, expected = COUNTS[name]
    counts = run_body(body, memory(128 * 32), **options)
    assert {field: getattr(counts, field) for field in expected} == expected


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


def test_classes_tensor_operations_and_barriers(run_body):
    body = """
    mov.b32 %r1, 0; bar.sync 0; add.s32 %r2, %r1, 1; bar.sync 0;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
      {%r4, %r5, %r6, %r7}, {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%r1, %r1, %r1, %r1};
    add.f32 %r8, %r4, %r5; cvt.rn.f16.f32 %h1, %r8;
    ld.global.b32 %r9, [%d0];
    """
    counts = run_body(body, memory(4), num_warps=3)
    assert counts.tensor_operations == 3 * 2 * 16 * 8 * 16
    assert counts.barriers == 3 * 2
    expected = {"tensor core": 3, "synchronisation": 6, "floating point": 3, "integer": 3}
    expected |= {"global load": 3, "move": 6, "conversion": 6, "control": 3, "parameter": 3}
    assert counts.instructions == expected
