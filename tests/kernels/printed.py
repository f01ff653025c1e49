"""The process of conftest that compiles kernels. Its first program binds them."""

import contextlib
import gc
import io
import multiprocessing
import os
import threading


def start() -> None:
    """Prepare the process. It ends with its parent."""
    os.environ.pop("TRITON_INTERPRET", None)
    gc.set_threshold(50_000, 20, 100)  # kernels as Python objects live to the end
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def printed_by(code: str) -> str:
    """The output of a program."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, {})
    return output.getvalue()
