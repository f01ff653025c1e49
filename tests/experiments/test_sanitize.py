"""The command that compute-sanitizer watches, as a plain run."""

from __future__ import annotations

import pytest

from experiments import sanitize
from experiments.kernel_accuracy import KERNELS, KernelAccuracy
from kernels.testing.accuracy import Accuracy


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "")  # which main sets


def test_every_kernel_of_the_package_has_a_case():
    import kernels

    assert set(KERNELS) == set(kernels.__all__)
    cases = list(sanitize.cases(list(KERNELS), cache_dtypes=("fp16", "fp8")))
    assert {case.kernel for case in cases} == set(kernels.__all__)
    decode = {case.feature for case in cases if case.kernel == "paged_decode_attention"}
    assert decode == {"none", "window", "split"}


def test_a_plain_run_is_clean(capsys):
    kernels = ("store_kvcache", "slot_mapping_from_positions", "merge_attention_states")
    flags = [flag for name in kernels for flag in ("--kernel", name)]
    assert sanitize.main([*flags, "--cache-dtype", "fp16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok") for line in lines)
    assert len(lines) == 2 * 2 + 2 + 2 * 2  # two block sizes; K and V, slots, output and LSE


def test_a_wrong_result_fails_the_run(monkeypatch, capsys):
    wrong = {"output": Accuracy(1.0, 0.0)}
    monkeypatch.setattr(KernelAccuracy, "check", lambda cell, device: wrong)
    assert sanitize.main(["--kernel", "copy_blocks", "--cache-dtype", "fp16"]) == 1
    assert "WRONG  copy_blocks, none, block 7, fp16 cache: output" in capsys.readouterr().out
