"""The process of conftest that compiles kernels. Its first program binds them."""

import contextlib
import io
import os

from experiments.harness.workers import set_up


def start() -> None:
    """Prepare the process. It ends with its parent."""
    os.environ.pop("TRITON_INTERPRET", None)
    set_up(threads=1)


def printed_by(code: str) -> str:
    """The output of a program."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, {})
    return output.getvalue()
