"""`test_ops.py` on the PTX of each architecture, in a process where kernels are not interpreted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def run_selection(run_without_interpreter):
    """Run `test_ops.py` on an architecture; returns what pytest prints."""

    def run(architecture: str) -> str:
        tests = str(Path(__file__).with_name("test_ops.py"))
        options = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--timeout", "600"]
        return run_without_interpreter(
            "-m", "pytest", tests, "--executor", f"ptx-{architecture}", *options
        )

    return run


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_every_op_dtype_and_feature(architecture, run_selection):
    output = run_selection(architecture)
    assert " passed" in output.splitlines()[-1]
    assert "skipped" not in output
    assert "xfailed" not in output


def test_on_sm_100_tensor_memory_is_refused_and_the_rest_runs(run_selection):
    """Where there are rows enough for it: in prefill and for shared prefixes, unless of fp32."""
    output = run_selection("sm_100")
    refusals = re.findall(r"^XFAIL \S+::(\w+)(.*)$", output, re.MULTILINE)
    assert {test for test, _ in refusals} == {
        "test_prefill", "test_prefill_of_other_heads", "test_shared_prefix",
    }  # fmt: skip
    assert all("tcgen05.alloc" in refusal for _, refusal in refusals)
    assert not any("[fp32]" in refusal for _, refusal in refusals)
    assert f" passed, {len(refusals)} xfailed" in output.splitlines()[-1]


def test_the_interpreter_and_the_executor_exclude_each_other():
    from kernels.executor import execute_ptx
    from kernels.primitives import INTERPRETED

    if not INTERPRETED.value:
        pytest.skip("kernels are compiled in this process")
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"), execute_ptx("sm_80"):
        pass


def test_unknown_architectures_are_refused():
    from kernels.executor import execute_ptx

    with pytest.raises(ValueError, match=r"architecture: expected one of sm_75, .*, got 'sm_70'"):
        execute_ptx("sm_70").__enter__()
