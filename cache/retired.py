"""Names of earlier versions: errors say what to use instead, as the table of CHANGELOG.md says."""

import functools
import re
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@functools.cache
def _table() -> dict[str, str]:
    """What to use instead of each name that is quoted in the first column of a row.

    Names of experiments and policies begin with their kind, as the row does.
    """
    found: dict[str, str] = {}
    with suppress(OSError):  # a copy without the file
        text = Path(__file__).with_name("CHANGELOG.md").read_text("utf-8")
        for kind, gone, use in re.findall(
            r"^\| (?:(experiment |policy ))?(.*) \| (.*) \|$", text, re.M
        ):
            found |= {kind + name: use for name in re.findall("`(.+?)`", gone)}
    return found


def advice(*names: str) -> str | None:
    """One line that says what to use instead of the first of ``names`` that is gone, or None."""
    name = next(filter(_table().get, names), None)
    return name and f"{name} is gone; instead: {_table()[name].replace('`', '')}"


def _find_spec(name: str, *_: object) -> None:
    if "." in name and (line := advice(name)):
        raise ImportError(line)


def install() -> None:
    """Explain failed imports of modules, and of names in packages, that are gone."""
    finder: Any = SimpleNamespace(find_spec=_find_spec)
    sys.meta_path.append(finder)  # asked last, for what no other finder has
