"""Runs `test_ops.py` on the PTX of each architecture, in the process that compiles kernels."""

from pathlib import Path

import pytest

from kernels.executor import execute_ptx
from kernels.primitives import INTERPRETED


@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_every_op(architecture, part, run_compiled, pytestconfig):
    """Without --all, how Triton specialises and launches is tested on sm_90, and the order where
    products are asynchronous, of decode on sm_80."""
    tests = str(Path(__file__).with_name("test_ops.py"))
    options = ["--executor", f"ptx-{architecture}", "--part", f"{part}/8"]
    if pytestconfig.getoption("--all"):
        options.append("--all")
    else:
        elsewhere = "" if architecture == "sm_90" else "dimension_of_one or equal_call or "
        other = "prefill" if architecture == "sm_80" else "decode"
        options += ["-k", f"not ({elsewhere}order and {other})"]
    assert "skipped" not in run_compiled(tests, *options)


def test_fp8_numbers_are_rounded_once_on_sm_89(run_compiled):
    """Triton converts fp32 there through f16, which rounds some numbers twice."""
    tests = str(Path(__file__).parents[1] / "test_fp8_cache.py")
    run_compiled(tests, "-k", "stored and 32 and None", "--executor", "ptx-sm_89")


def test_the_executor_refuses_interpreted_kernels():
    if not INTERPRETED.value:
        pytest.skip("kernels are compiled in this process")
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"), execute_ptx("sm_80"):
        pass


def test_unknown_architectures_are_refused():
    with pytest.raises(ValueError, match=r"architecture: expected one of sm_75, .*, got 'sm_70'"):
        execute_ptx("sm_70").__enter__()
