"""What conftest's process that compiles kernels runs; it imports nothing that binds them."""

import contextlib
import io


def printed_by(code: str) -> str:
    """What a program prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, {})
    return output.getvalue()
