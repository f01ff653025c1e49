"""Fixtures that run kernels written in PTX."""

import pytest

HEAD = """
.version 8.7
.target {target}
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry broken({parameters})
{{
	.reg .pred %p<8>;
	.reg .b16 %h<16>;
	.reg .b32 %r<96>;
	.reg .b64 %d<32>;
	.loc 1 7 3 // broken.py:7:3
{body}
	ret;
}}
"""


def kernel_text(body: str, num_tensors: int = 1, target: str = "sm_100a") -> str:
    """PTX of a kernel. %d0, %d1 ... hold the tensors' addresses, %r0 and %d10 the thread index."""
    parameters = ", ".join(f".param .u64 p{number}" for number in range(num_tensors))
    loads = [f"ld.param.b64 %d{number}, [p{number}];" for number in range(num_tensors)]
    lines = [*loads, "mov.u32 %r0, %tid.x;", "cvt.u64.u32 %d10, %r0;", body]
    return HEAD.format(target=target, parameters=parameters, body="\n".join(lines))


def caught(run, *arguments, **options):
    """The Fault that run(*arguments, **options) raises."""
    from kernels.executor import Fault  # see run_body

    with pytest.raises(Fault) as raised:
        run(*arguments, **options)
    return raised.value


@pytest.fixture
def run_body():
    """Function that runs a kernel on tensors. body: see `kernel_text`."""
    from kernels.executor import run_ptx  # only after `--executor` has been parsed

    def run(body: str, *tensors, target: str = "sm_100a", **options):
        return run_ptx(kernel_text(body, len(tensors), target), tensors, **options)

    return run


def pytest_ignore_collect(collection_path, config):
    """Collect tests of compiled kernels only with `--executor`. Other runs use the interpreter."""
    if collection_path.name == "test_ops.py" and not config.getoption("--executor", None):
        return True
    return None
