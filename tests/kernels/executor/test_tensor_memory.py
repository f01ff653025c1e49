"""tcgen05: products with operands in shared and tensor memory, and faults without waits."""

import pytest
import torch

from kernels.executor import Fault, FaultKind, UnknownInstruction

from .conftest import caught

N, K = 16, 16
# %d0: the rows of A, then the rows of B, [rows, K]. %d1: D. The first KiB of shared memory holds an
# mbarrier and the address of tensor memory. A and B follow as matrices of 8 rows of 16 bytes. The
# second half of K is 128 bytes further, the next 8 rows are 256 bytes further.
ROW_TO_SHARED = """
    shl.b64 %d11, %d10, 5; add.s64 %d12, {source}, %d11;
    ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%d12];
    ld.global.v4.b32 {{%r8, %r9, %r10, %r11}}, [%d12+16];
    shr.u32 %r12, %r0, 3; shl.b32 %r12, %r12, 8; and.b32 %r13, %r0, 7; shl.b32 %r13, %r13, 4;
    add.s32 %r14, %r12, %r13;
    st.shared.v4.b32 [%r14+{to}], {{%r4, %r5, %r6, %r7}};
    st.shared.v4.b32 [%r14+{to_half}], {{%r8, %r9, %r10, %r11}};
"""
DESCRIPTOR = 1 << 46 | (128 >> 4) << 16 | (256 >> 4) << 32
REGISTERS = ", ".join(f"%r{20 + i}" for i in range(N))
RESULT = f"""
    tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {{{REGISTERS}}}, [%r3 + 0];
    tcgen05.wait::ld.sync.aligned;
    shl.b64 %d13, %d10, 6; add.s64 %d14, %d1, %d13;
    {" ".join(f"st.global.b32 [%d14+{4 * i}], %r{20 + i};" for i in range(N))}
"""


def product(m: int = 128, *, from_tensor_memory: bool = False) -> str:
    """Kernel with four warps. The first product sets D = A B^T, the second adds A B^T to it."""
    form = 1 << 4 | (N // 8) << 17 | (m // 16) << 24
    a = ROW_TO_SHARED.format(source="%d0", to=1024, to_half=1152)
    left = "%d20"
    if from_tensor_memory:  # a row per lane: eight columns of two elements
        left = "[ %r2 + 32 ]"
        a += """
        tcgen05.st.sync.aligned.32x32b.x8.b32 [%r3 + 32],
            {%r4, %r5, %r6, %r7, %r8, %r9, %r10, %r11};
        tcgen05.wait::st.sync.aligned;
        """
    b = ROW_TO_SHARED.format(source="%d15", to=8192, to_half=8320)
    mma = f"@%p2 tcgen05.mma.cta_group::1.kind::f16 [ %r2 + 0 ], {left}, %d21, %r40, {{}};"
    return f"""
    setp.lt.u32 %p1, %r0, 32; setp.eq.u32 %p2, %r0, 0;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [16], 64;
    @%p2 mbarrier.init.shared::cta.b64 [0], 1;
    bar.sync 0;
    ld.shared.b32 %r2, [16];
    shr.u32 %r3, %r0, 5; shl.b32 %r3, %r3, 21; add.s32 %r3, %r3, %r2;
    {a}
    add.s64 %d15, %d0, {m * 2 * K};
    setp.lt.u32 %p4, %r0, {N}; @!%p4 bra STORED;
    {b}
    STORED:
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mov.b64 %d20, {DESCRIPTOR | 1024 >> 4}; mov.b64 %d21, {DESCRIPTOR | 8192 >> 4};
    mov.b32 %r40, {form}; mov.b32 %r41, 0; mov.pred %p5, 0; mov.pred %p6, -1;
    {mma.format("%p5")}
    {mma.format("%p6")}
    @%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [0];
    {{
    .reg .pred complete;
    waitLoop:
    mbarrier.try_wait.parity.shared::cta.b64 complete, [0], %r41;
    @!complete bra.uni waitLoop;
    }}
    {RESULT}
    bar.sync 0;
    @%p2 mbarrier.inval.shared::cta.b64 [0];
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64;
    """


@pytest.fixture
def run(run_body):
    """Function that runs a kernel from `product` on m rows of A. Returns (D, expected D)."""

    def run(body: str, m: int = 128, **options):
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(m + N, K, generator=generator).half()
        given = torch.cat([rows, torch.zeros(128 - m, K).half()])  # all threads load a row of A
        out = torch.zeros(128, N)
        options = {"num_warps": 4, "shared_bytes": 16384} | options
        run_body(body, given.view(torch.int16), out, **options)
        exact = 2 * rows[:m].double() @ rows[m:].double().T
        return out, exact.float()

    return run


def assert_exact(out: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(out, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("from_tensor_memory", [False, True], ids=["shared", "tensor"])
def test_product_of_128_rows(run, from_tensor_memory, seed):
    assert_exact(*run(product(from_tensor_memory=from_tensor_memory), seed=seed))


def test_product_of_64_rows_uses_half_of_the_lanes(run):
    out, exact = run(product(64), m=64)
    out = out.view(4, 2, 16, N)
    assert_exact(out[:, 0].reshape(64, N), exact)
    assert out[:, 1].isnan().all()


WAIT_LOOP = "@!complete bra.uni waitLoop;"
FIRST_BARRIER = "bar.sync 0;\n    ld.shared.b32 %r2, [16];"
ALLOC = "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [16], 64;"
WAIT = "{\n    .reg .pred complete;"
LOAD_BARRIER = "bar.sync 0;\n    @%p2 mbarrier.inval"


@pytest.mark.parametrize(
    ("removed", "left", "kind", "why"),
    [
        ("mbarrier.try_wait.parity.shared::cta.b64 complete, [0], %r41;\n    " + WAIT_LOOP, "",
         FaultKind.MATRIX_IN_FLIGHT, "a product that writes it may still run"),
        (WAIT_LOOP, "", FaultKind.MATRIX_IN_FLIGHT, "a product that writes it may still run"),
        ("tcgen05.wait::ld.sync.aligned;", "", FaultKind.COPY_IN_FLIGHT, "not been waited for"),
        ("tcgen05.wait::st.sync.aligned;", "", FaultKind.COPY_IN_FLIGHT, "not been waited for"),
        ("fence.proxy.async.shared::cta;", "", FaultKind.FENCE, "fence.proxy.async"),
        ("STORED:\n    fence.proxy.async.shared::cta;\n    bar.sync 0;", "STORED:",
         FaultKind.TENSOR_RACE, "warp 1 of the program wrote it since the last barrier"),
        (FIRST_BARRIER, "ld.shared.b32 %r2, [16];", FaultKind.SHARED_RACE, "wrote it since"),
        (LOAD_BARRIER, "@%p2 mbarrier.inval", FaultKind.SHARED_RACE, "read it since"),
        ("@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [0];", "",
         FaultKind.ENDLESS, "every warp waits, and no thread can arrive"),
        ("@%p2 mbarrier.init.shared::cta.b64 [0], 1;", "@%p2 st.shared.b64 [0], %d10;",
         FaultKind.BARRIER, "no mbarrier at 0x0"),
        (ALLOC, ALLOC + ALLOC.replace("[16], 64", "[24], 512"), FaultKind.ENDLESS,
         "no 512 free columns"),
        (WAIT, "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64;" + WAIT,
         FaultKind.MATRIX_IN_FLIGHT, "a product that writes it may still run"),
        ("cta.b32 [16], 64;", "cta.b32 [16], 32;", FaultKind.OUT_OF_BOUNDS, "is not allocated"),
        ("%r3, %r3, 21;", "%r3, %r3, 22;", FaultKind.OUT_OF_BOUNDS, "are not the warp's"),
    ],
    ids=["mbarrier wait", "wait loop", "load wait", "store wait", "fence",
         "barrier before the product", "barrier after the allocation", "barrier after the wait",
         "commit", "init", "free columns", "deallocation", "columns", "lanes"],
)  # fmt: skip
def test_faults(run, removed, left, kind, why):
    body = product(from_tensor_memory=True)
    assert removed in body
    with pytest.raises(Fault, match=why) as raised:
        run(body.replace(removed, left))
    assert raised.value.kind is kind


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_waiting_loop_lets_the_thread_run_that_it_waits_for(run, seed):
    """The thread that issues the products stands behind the loop, and in its warp."""
    before, rest = product().split("@%p2 tcgen05.mma", 1)
    issue, rest = rest.split("{\n    .reg .pred complete;", 1)
    issue = "@%p2 tcgen05.mma" + issue
    wait, rest = rest.split("}\n", 1)
    body = (
        before + ".reg .pred complete; @%p2 bra ISSUE;" + wait + rest
        + "bra.uni END; ISSUE: " + issue + "bra.uni waitLoop; END: mov.u32 %r1, %r0;"
    )  # fmt: skip
    assert_exact(*run(body, seed=seed))
    with pytest.raises(Fault, match="every warp waits") as raised:
        run(body.replace("bra.uni waitLoop; END:", "END:").replace(issue, ""), seed=seed)
    assert raised.value.kind is FaultKind.ENDLESS


@pytest.mark.parametrize("fenced", [0, 1])
def test_fence_holds_for_its_program_alone(run, fenced):
    fence = "fence.proxy.async.shared::cta;"
    by_one = f"mov.u32 %r50, %ctaid.x; setp.eq.u32 %p7, %r50, {fenced}; @%p7 {fence}"
    fault = caught(run, product().replace(fence, by_one), grid=(2, 1, 1))
    assert (fault.kind, fault.program) == (FaultKind.FENCE, (1 - fenced, 0, 0))


def test_product_that_overwrites_loaded_results_needs_a_barrier(run):
    body = product()
    start = body.index("@%p2 tcgen05.commit")
    wait = body[start : body.index("}", start) + 1].replace("%r41", "1")
    again = "@%p2 tcgen05.mma.cta_group::1.kind::f16 [ %r2 + 0 ], %d20, %d21, %r40, %p5;" + wait
    assert_exact(*run(body.replace(LOAD_BARRIER, "bar.sync 0;" + again + LOAD_BARRIER)))
    with pytest.raises(Fault, match="another warp of the program read it since") as raised:
        run(body.replace(LOAD_BARRIER, again + LOAD_BARRIER))
    assert raised.value.kind is FaultKind.TENSOR_RACE


def test_operand_overwritten_while_the_product_is_in_flight(run):
    body = product()
    start = body.index("{\n    .reg .pred complete;")
    with pytest.raises(Fault, match="a product that reads it may still run"):
        run(body[:start] + "@%p2 st.shared.b32 [1024], %r0;\n" + body[start:])
    end = body.index("}", start) + 1  # allowed after the wait, without a barrier
    assert_exact(*run(body[:end] + "@%p2 st.shared.b32 [1024], %r0;\n" + body[end:]))


@pytest.mark.parametrize(
    ("supported", "unsupported"),
    [
        (f"mov.b32 %r40, {1 << 4 | (N // 8) << 17 | 8 << 24};", "mov.b32 %r40, 0;"),
        (f"mov.b64 %d21, {DESCRIPTOR | 8192 >> 4};", f"mov.b64 %d21, {DESCRIPTOR | 1 << 61};"),
    ],
    ids=["instruction", "matrix"],
)
def test_unsupported_descriptors(run, supported, unsupported):
    assert supported in product()
    with pytest.raises(UnknownInstruction, match=r"tcgen05\.mma.*descriptor of 0x"):
        run(product().replace(supported, unsupported))
