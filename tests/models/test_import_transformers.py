"""transformers, where Hugging Face's package `kernels` seems to be installed."""

from __future__ import annotations

import importlib.util
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


def test_kernels_can_be_imported_while_transformers_is():
    threads = """
import importlib, sys, threading
import kernels
from kernels.testing.hugging_face import import_transformers

threads = [threading.Thread(target=import_transformers) for _ in range(3)]
find = importlib.util.find_spec
[thread.start() for thread in threads]
while any(thread.is_alive() for thread in threads):
    assert sys.modules["kernels"] is kernels
    sys.modules.pop("kernels.reference", None)
    importlib.import_module("kernels.reference")
assert importlib.util.find_spec is find
"""
    assert importlib.util.find_spec("transformers")
    subprocess.run([sys.executable, "-c", threads], check=True, timeout=120)
