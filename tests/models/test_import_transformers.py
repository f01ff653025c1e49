"""transformers, where Hugging Face's package `kernels` seems to be installed."""

import subprocess
import sys

import pytest

from kernels.testing.hugging_face import import_transformers


def test_our_kernels_are_not_taken_for_those_of_hugging_face(transformers, tmp_path, monkeypatch):
    from transformers.utils.import_utils import KERNELS_MIN_VERSION, is_kernels_available

    metadata = tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    monkeypatch.syspath_prepend(tmp_path)
    is_kernels_available.cache_clear()
    try:
        assert is_kernels_available()
        with pytest.raises(ImportError):
            from kernels import CUDAProperties  # noqa: F401
        is_kernels_available.cache_clear()
        import_transformers()
        assert not is_kernels_available()
    finally:
        is_kernels_available.cache_clear()
        import_transformers()


def test_kernels_can_be_imported_while_transformers_is(transformers):
    threads = """
import importlib, sys, threading
from kernels.testing.hugging_face import import_transformers
threads = [threading.Thread(target=import_transformers) for _ in range(3)]
[thread.start() for thread in threads]
while any(thread.is_alive() for thread in threads):
    sys.modules.pop("kernels.reference", None)
    importlib.import_module("kernels.reference")"""
    subprocess.run([sys.executable, "-c", threads], check=True, timeout=120)
