"""The command ``pagelab``.  In a checkout ``python -m experiments`` is the same command."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from experiments.gpu import contact


def main(arguments: list[str] | None = None) -> int:
    """Run one command line.  Returns the exit status.  The command gpu needs no tyro."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["gpu"]:
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
