"""The command ``pagelab``.  In a checkout ``python -m experiments`` is the same command."""

from __future__ import annotations

import gc
import os
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one command line.  Returns the exit status.  The command gpu needs no tyro."""
    gc.set_threshold(50_000, 20, 100)  # imported packages make a million objects that stay
    try:
        status = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:  # while modules are imported; later each command prints its own line
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"error: {error}", file=sys.stderr)
        # Nothing can be printed any more, and Python would try again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 2


def _run(arguments: list[str]) -> int:
    from importlib.util import find_spec

    if arguments[:1] == ["gpu"]:
        from experiments.gpu import contact

        return contact.main(arguments[1:])
    if find_spec("tyro") is None:
        print("error: needs the package tyro; only the command gpu runs without", file=sys.stderr)
        return 2
    if arguments[:1] == ["generate"]:
        from models import generate

        return generate.main(arguments[1:])
    from experiments import cli

    return cli.main(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
