"""TMA, mbarriers with bytes, named barriers and setmaxnreg: a producer and four consumer warps."""

import numpy as np
import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.executor import Fault, FaultKind, run_ptx
from kernels.executor.warpgroup import operand_chunks

from .conftest import caught, kernel_text

WAIT = "AT: mbarrier.try_wait.parity.shared::cta.b64 %p6, [{}], {}; @!%p6 bra AT;"
READY, EMPTY = WAIT.format(4096, "%r1").replace("AT", "READY"), WAIT.format(4104, 0)
ARRIVE = "@%p3 mbarrier.arrive.shared::cta.b64 _, [4104];"
READ = "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2];"
COPY = """
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [4096], 2048;
    cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
        [0], [%d1, {{{}, {}}}], [4096];
"""
CORNERS = ((-5, 2), (13, 17))
# The producer copies two boxes of 2 KiB to the start of shared memory. Thread t of the consumers
# loads chunk t of a box, and gets the first word of thread t ^ 32 through memory from 8192 on.
BODY = f"""
    setp.eq.u32 %p1, %r0, 0; and.b32 %r2, %r0, 31; setp.eq.u32 %p3, %r2, 0;
    @%p1 mbarrier.init.shared::cta.b64 [4096], 1;
    @%p1 mbarrier.init.shared::cta.b64 [4104], 4;
    bar.sync 0;
    setp.ge.u32 %p2, %r0, 128; @%p2 bra PRODUCER;
    setmaxnreg.inc.sync.aligned.u32 160;
    mov.b32 %r1, 0; shl.b32 %r2, %r0, 4; shl.b32 %r3, %r0, 2; xor.b32 %r8, %r3, 128;
    CONSUME: {READY}
    {READ}
    st.shared.b32 [%r3+8192], %r4;
    bar.sync 1, 128;
    ld.shared.b32 %r9, [%r8+8192];
    barrier.cta.sync.aligned 1, 128;
    {ARRIVE}
    mad.lo.s32 %r10, %r1, 128, %r0; mul.wide.u32 %d2, %r10, 32; add.s64 %d3, %d0, %d2;
    st.global.v4.b32 [%d3], {{%r4, %r5, %r6, %r7}}; st.global.b32 [%d3+16], %r9;
    add.s32 %r1, %r1, 1; setp.lt.u32 %p4, %r1, 2; @%p4 bra CONSUME;
    bra DONE;
    PRODUCER: setmaxnreg.dec.sync.aligned.u32 96;
    setp.ne.u32 %p5, %r0, 128; @%p5 bra DONE;
    {COPY.format(*CORNERS[0])} {EMPTY} {COPY.format(*CORNERS[1])}
    DONE: mov.b32 %r11, 0;
"""


def described(swizzle: int) -> tuple[TensorDescriptor, dict]:
    """24 rows of 70 elements, 80 apart, and boxes of 2 KiB."""
    tensor = torch.arange(1, 1921, dtype=torch.int16).view(24, 80)[:, :70]
    width = (32, 16, 32, 64)[swizzle]
    descriptor = TensorDescriptor.from_tensor(tensor, [1024 // width, width])
    meta = {"swizzle": swizzle, "elem_size": 2, "fp4_padded": False}
    return descriptor, meta | {"block_size": descriptor.block_shape}


def run(body: str = BODY, swizzle: int = 3, seed: int | None = None, **changes) -> torch.Tensor:
    """[boxes, chunks, 16-bit elements] that the consumers have loaded, and the exchanged words."""
    text = kernel_text(body, 2, "sm_90a").replace(".u64 p1", ".align 64 .b8 p1[128]")
    text = text.replace("ld.param.b64 %d1, [p1];", "mov.b64 %d1, p1; cvta.param.u64 %d1, %d1;")
    text = text.replace(")\n{", ")\n.maxnreg 128\n{")
    out, (descriptor, meta) = torch.zeros(2, 128, 8, dtype=torch.int32), described(swizzle)
    vars(descriptor).update(changes)
    run_ptx(text, [out, (descriptor, meta)], num_warps=8, shared_bytes=16384, seed=seed)
    return out


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("swizzle", range(4))
def test_boxes_arrive_swizzled_and_padded_with_zeros(swizzle, seed):
    descriptor, _ = described(swizzle)
    rows, columns = descriptor.block_shape
    padded = torch.nn.functional.pad(descriptor.base, (64, 64, 64, 64))
    out = run(swizzle=swizzle, seed=seed)
    for got, (x, y) in zip(out, CORNERS, strict=True):
        box = padded[y + 64 : y + 64 + rows, x + 64 : x + 64 + columns]
        at = torch.arange(128)
        place = at ^ (at >> 3 & (0, 1, 3, 7)[swizzle])
        assert torch.equal(got[:, :4].contiguous().view(torch.int16), box.reshape(128, 8)[place])
        assert torch.equal(got[:, 4], got[at ^ 32, 0])


# What is replaced, the fault and words of it. In a seeded order, other kinds may come first.
SOME = "setp.ge.u32 %p7, %r0, 32; @%p7 bra SKIP; {} SKIP: mov.b32 %r11, 0;"
FAULTS = {
    "arrival": (ARRIVE, "", "ENDLESS", "no thread can arrive"),
    "bytes that never come": ("2048;", "4096;", "ENDLESS", "2048 of 4096 expected bytes"),
    "bytes that are not expected": ("2048;", "1024;", "BARRIER", "2048 of 1024 expected bytes"),
    "wait for the copy": (READY, "", "UNWRITTEN COPY_IN_FLIGHT", ""),
    "wait by one warp": (READY, SOME.format(READY), "UNWRITTEN COPY_IN_FLIGHT SHARED_RACE", ""),
    "wait for the consumers": (EMPTY, "", "COPY_IN_FLIGHT SHARED_RACE", "by a TMA copy"),
    "late arrival": (READ, ARRIVE + READ, "SHARED_RACE ENDLESS COPY_IN_FLIGHT BARRIER", ""),
    "fence": (ARRIVE, "st.shared.b32 [%r2], %r4;" + ARRIVE, "FENCE", "by a TMA copy"),
    "count": ("bar.sync 1, 128", "bar.sync 1, 160", "BARRIER ENDLESS", "128 of 160"),
    "larger count": ("bar.sync 1, 128", "bar.sync 1, 64", "BARRIER", "or more came"),
    "named barrier": ("bar.sync 1, 128;", "", "SHARED_RACE UNWRITTEN", ""),
    "half of a warp group": (
        "setmaxnreg.inc", "setp.lt.u32 %p7, %r0, 64; @%p7 setmaxnreg.inc", "DIVERGENCE", "group",
    ),
    "registers": ("u32 160", "u32 168", "ENDLESS", ""),
    "decrease": ("u32 96", "u32 136", "UNDEFINED", "the warp has fewer registers"),
    "place in shared memory": ("[0], [%d1", "[64], [%d1", "MISALIGNED", "no multiple of 128"),
    "corner": ("{-5, 2}", "{%r50, 2}", "UNDEFINED", "nothing wrote the register"),
    "tensor map": ("[0], [%d1", "[0], [%d0", "OUT_OF_BOUNDS", "no tensor map of 2 dimensions"),
}  # fmt: skip


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", FAULTS)
def test_faults(name, seed):
    old, new, kinds, words = FAULTS[name]
    assert old in BODY
    fault = caught(run, BODY.replace(old, new), seed=seed)
    assert fault.kind.name in kinds.split()
    assert words in str(fault)


def test_fence_lets_a_copy_overwrite_what_threads_wrote():
    run(BODY.replace(ARRIVE, "st.shared.b32 [%r2], %r4; fence.proxy.async.shared::cta;" + ARRIVE))


def test_boxes_outside_the_tensor_and_maps_that_a_gpu_refuses():
    with pytest.raises(Fault, match="spans 3820 bytes") as raised:
        run(shape=[64, 70])
    assert (raised.value.kind, raised.value.tensor) == (FaultKind.OUT_OF_BOUNDS, "p1")
    with pytest.raises(ValueError, match=r"p1: expected .* multiples of 16 bytes"):
        run(strides=[81, 1])


@pytest.mark.parametrize(("mode", "width"), [(1, 128), (2, 64), (3, 32)])
def test_chunks_of_an_operand_are_swizzled(mode, width):
    row, chunk = np.arange(8)[:, None], np.arange(2)
    swizzled = row * width + 16 * (chunk ^ row * width // 128 % (width // 16))
    assert (operand_chunks(mode << 62, 8, 2, False) == swizzled).all()
