"""The fence that Triton before 3.7.1 leaves out, see kernels/fences.py. The executor checks, with
the installed Triton, that no kernel lacks one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from triton.backends import backends
from triton.backends.compiler import GPUTarget, Language
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.compiler import make_backend

from kernels.fences import add_fences, fence_copies

WAIT, FENCE = "\tcp.async.wait_group \t5;\n", "\tfence.proxy.async.shared::cta;\n"
PTX = f"{WAIT}\tbar.sync 0;\n\t{{product}};\n{WAIT}"
FENCED = PTX.replace(WAIT, WAIT + FENCE)


@pytest.mark.parametrize(
    ("product", "expected"),
    [
        ("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16", FENCED),
        ("@%p1 tcgen05.mma.cta_group::1.kind::f16", FENCED),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", PTX),
    ],
)
def test_copies_are_fenced_where_products_are_asynchronous(product, expected):
    assert fence_copies(PTX.format(product=product)) == expected.format(product=product)


@pytest.mark.parametrize(
    ("version", "adds"),
    [("3.6.0", True), ("3.7.0+git1234", True), ("3.7.1", False), ("3.10.0", False)],
)
def test_old_versions_compile_with_fences_under_a_cache_key_of_their_own(
    version, adds, monkeypatch
):
    ptx = PTX.format(product="wgmma.mma_async")
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr(CUDABackend, "make_ptx", lambda *_: ptx)
    monkeypatch.setitem(backends, "nvidia", replace(backends["nvidia"], compiler=CUDABackend))
    target, stages = GPUTarget("cuda", 90, 32), {}
    unfenced_hash = make_backend(target).hash()
    add_fences()
    add_fences()
    backend = make_backend(target)
    backend.add_stages(stages, SimpleNamespace(arch="sm90"), Language.TRITON)
    assert stages["ptx"]("", {}) == (ptx.replace(WAIT, WAIT + FENCE) if adds else ptx)
    assert (backend.hash() == unfenced_hash) == (not adds)
