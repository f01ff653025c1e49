"""Run by conftest's process that compiles kernels; imports nothing that binds them."""

import contextlib
import io


def printed_by(code: str) -> str:
    """The output of a program."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, {})
    return output.getvalue()
