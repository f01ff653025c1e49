"""The fence that Triton before 3.7.1 leaves out. The executor finds a kernel that lacks one."""

from dataclasses import replace

import pytest
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.compiler import make_backend

from kernels.fences import add_fences

WAIT, FENCE = "\tcp.async.wait_group \t5;\n", "\tfence.proxy.async.shared::cta;\n"
VERSIONS = [("3.6.0", True), ("3.7.0+git", True), ("3.7.1", False), ("3.10.0", False)]
PRODUCTS = [("wgmma.mma_async.sync", True), ("@%p1 tcgen05.mma.cta", True), ("mma.sync", False)]


@pytest.mark.parametrize(("version", "is_old"), VERSIONS)
@pytest.mark.parametrize(("product", "is_async"), PRODUCTS)
def test_old_versions_fence_copies(version, is_old, product, is_async, monkeypatch):
    ptx = f"{WAIT}\tbar.sync 0;\n\t{product};\n{WAIT}"
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr(CUDABackend, "make_ptx", lambda *_: ptx)
    monkeypatch.setitem(backends, "nvidia", replace(backends["nvidia"], compiler=CUDABackend))
    target = GPUTarget("cuda", 90, 32)
    unfenced_hash = make_backend(target).hash()
    add_fences()
    add_fences()
    backend = make_backend(target)
    assert backend.make_ptx() == (ptx.replace(WAIT, WAIT + FENCE) if is_old and is_async else ptx)
    assert (backend.hash() != unfenced_hash) == is_old
