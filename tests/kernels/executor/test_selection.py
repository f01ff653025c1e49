"""Runs `test_ops.py` on the PTX of each architecture, in a process without the interpreter."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_every_op(architecture, run_without_interpreter):
    tests, executor = Path(__file__).with_name("test_ops.py"), f"ptx-{architecture}"
    plugins = ["-p", "no:randomly", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=600"]
    output = run_without_interpreter(
        "-m", "pytest", str(tests), "-v", "--executor", executor, *plugins
    )
    assert " passed" in output.splitlines()[-1]
    assert "skipped" not in output


def test_fp8_numbers_are_rounded_once_on_sm_89(run_without_interpreter):
    """Triton converts fp32 there through f16, which rounds some numbers twice."""
    tests = str(Path(__file__).parents[1] / "test_fp8_cache.py")
    options = ["-k", "stored and 32 and None", "--executor", "ptx-sm_89", "-p", "no:cacheprovider"]
    assert " passed" in run_without_interpreter("-m", "pytest", tests, *options)


def test_the_executor_refuses_interpreted_kernels():
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
