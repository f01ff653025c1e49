"""Compile the kernels without a GPU, and read registers, spills and instructions.

The public ops are called on meta tensors (shapes and strides without memory) under a stand-in for
the GPU driver. The launcher chooses tiles and specialises arguments as on the GPU. Then the kernel
is compiled for the wanted architecture instead of launched, so these are the kernels that run.

Registers, memory, widths of global accesses and asynchronous copies, and tensor-core use come from
the cubin (by cuobjdump, part of Triton's wheel), the PTX and the TTGIR. Needs a process without
TRITON_INTERPRET. `pytest --all -o timeout=1800 tests/kernels/test_compile.py` compiles all of
shipped.py.
"""

import contextlib
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kernels.compiled.architectures import Architecture
from kernels.primitives import INTERPRETED
from kernels.tiles import force_target


@dataclass(frozen=True)
class KernelResources:
    """Resources of one compiled kernel. Counts are instructions in its PTX."""

    op: str
    config: str
    kernel: str
    arch: str
    num_warps: int
    num_stages: int
    registers: int
    """Per thread."""
    local_bytes: int
    """Stack and local memory per thread: 0 unless registers spill."""
    global_loads: dict[int, int]
    """Loads to registers by width in bits."""
    async_copies: dict[int, int]
    """Asynchronous global-to-shared copies by width in bits."""
    global_stores: dict[int, int]
    """Stores from registers by width in bits."""
    dots: int
    """Matrix products in the source program, after inlining and loop peeling."""
    tensor_core_dots: int
    """Matrix products that run on tensor cores."""
    mma: dict[str, int]
    """Tensor-core instructions by family: mma.sync, wgmma, tcgen05."""
    softmax_overlaps: int
    """Loops that begin their softmax while wgmma of the previous pass run; sm_90 only."""
    signature: dict[str, str]
    """Types of the kernel's run-time arguments: "i32", "*bf16" ..."""
    constants: dict[str, int | float | str | bool | None]
    """The kernel's compile-time constants (tile shape, features ...)."""
    programs_per_multiprocessor: int
    """Programs that fit a multiprocessor."""


@contextlib.contextmanager
def without_gpu(arch: Architecture) -> Iterator[None]:
    """Tiles and compilations are those for `arch`; nothing may be launched."""
    previous = driver._active
    stand_in: Any = SimpleNamespace(
        get_current_target=lambda: arch.compile_target,
        get_current_device=lambda: arch.name,
        get_current_stream=lambda _device: 0,
    )
    driver.set_active(stand_in)
    try:
        with force_target(arch.tiles_target):
            yield
    finally:
        driver._active = previous


def launched_by(
    call: Callable[[], object], arch: Architecture
) -> list[tuple[JITFunction, ASTSource, dict[str, int | bool]]]:
    """Kernels that `call`, an op on meta tensors, would launch, with their compiler options.

    Raises:
        RuntimeError: the process runs the kernels in the interpreter.
    """
    if INTERPRETED.value:
        raise RuntimeError(
            "kernels are bound to the interpreter: unset TRITON_INTERPRET to compile"
        )
    launches = []

    def take_over(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        function, *parts = fn.jit_function, compile["signature"], compile["constants"]
        names = (
            "num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_pdl"
        )  # fmt: skip
        given = json.loads(compile["specialization_data"])["options"]
        options = {name: given[name] for name in names if name in given}
        source = function.ASTSource(function, *parts, compile["configs"][0])
        launches.append((function, source, options))
        return True

    previous, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, take_over
    try:
        with without_gpu(arch):
            call()
    finally:
        triton.knobs.runtime.jit_cache_hook = previous
    return launches


def compile_call(call: Callable[[], object], arch: Architecture) -> list:
    """`launched_by`, compiled: (JITFunction, ASTSource, Triton's CompiledKernel) of each launch."""
    with without_gpu(arch):
        return [
            (function, source, triton.compile(source, arch.compile_target, options))
            for function, source, options in launched_by(call, arch)
        ]


def _cuobjdump(cubin: bytes, flag: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, flag, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _ptx_widths(ptx: str, instruction: str) -> dict[int, int]:
    """Count ld.global or st.global by width in bits: ld.global.v4.b32 is 128 bits."""
    accesses = re.findall(rf"\b{instruction}\S*?(?:\.v(\d))?\.[busf](\d+)\s", ptx)
    return dict(Counter(sorted(int(vector or 1) * int(bits) for vector, bits in accesses)))


def count_softmax_overlaps(ptx: str) -> int:
    """Loops whose last wgmma are neither waited for nor preceded by the softmax of their pass."""
    letters = {"mma_async": "m", "wait_group": "w", "ex2": "e", "bra": "b"}
    order = re.findall(r"^\s+(?:@\S+ )?(?:wgmma\.)?(mma_async|wait_group|ex2|bra)\b", ptx, re.M)
    return len(re.findall("wm+b", "".join(letters[one] for one in order)))


def _dots(ttgir: str) -> tuple[int, int]:
    """Number of matrix products in the TTGIR, and of those with a tensor-core layout."""
    products = re.findall(r"^.*(?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma) .*$", ttgir, re.M)
    on_tensor_cores = [
        line for line in products if "tt.dot" not in line or re.search(r"-> tensor<.*#mma", line)
    ]
    return len(products), len(on_tensor_cores)


def read_resources(
    op: str, config: str, arch: Architecture,
    jit_function: JITFunction, source: ASTSource, compiled: Any,
) -> KernelResources:  # fmt: skip
    """Resources of one compiled kernel."""
    cubin, ptx, metadata = compiled.asm["cubin"], compiled.asm["ptx"], compiled.metadata
    usage = re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", _cuobjdump(cubin, "-res-usage"))
    used = {key: int(value) for key, value in usage}
    # The third operand of cp.async is a number of bytes.
    copies = re.findall(r"\bcp\.async\.c[ag]\.\S+ \[[^]]+\], \[[^]]+\], (\w+)", ptx)
    opcodes = {"mma.sync": "mma.sync", "wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma"}
    counts = {one: len(re.findall(rf"\b{re.escape(op)}", ptx)) for one, op in opcodes.items()}
    dots, tensor_core_dots = _dots(compiled.asm["ttgir"])
    resident_programs = arch.resident_programs(
        registers=used["REG"],
        shared_bytes=used["SHARED"] + metadata.shared,
        num_warps=metadata.num_warps,
        tensor_memory_columns=metadata.tmem_size,
    )
    names = jit_function.arg_names
    return KernelResources(
        op=op,
        config=config,
        kernel=jit_function.fn.__name__,
        arch=arch.name,
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        registers=used["REG"],
        local_bytes=used["STACK"] + used["LOCAL"],
        global_loads=_ptx_widths(ptx, "ld.global"),
        async_copies=dict(Counter(sorted(8 * int(size, 0) for size in copies))),
        global_stores=_ptx_widths(ptx, "st.global"),
        dots=dots,
        tensor_core_dots=tensor_core_dots,
        mma={family: count for family, count in counts.items() if count},
        softmax_overlaps=count_softmax_overlaps(ptx),
        signature={name: kind for name, kind in source.signature.items() if kind != "constexpr"},
        constants={
            names[path[0]]: str(value) if isinstance(value, tl.dtype) else value
            for path, value in source.constants.items()
        },
        programs_per_multiprocessor=min(resident_programs.values()),
    )
