"""Policies and managers of a user's own in the cells of experiments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.harness import InputFile


@dataclass(frozen=True)
class OwnClass:
    """A class in a user's file.  A cell's result depends on the content of the file."""

    file: InputFile
    name: str

    def __str__(self) -> str:
        return f"{self.file.name}:{self.name}"


def named(name: str) -> str | OwnClass:
    """What a cell holds for the name of a policy or manager, or for file.py:Class."""
    if ".py:" not in name:
        return name
    path, _, class_name = name.rpartition(":")
    return OwnClass(InputFile.of(Path(path)), class_name)


def spec_of(held: str | OwnClass) -> str:
    """The name or file.py:Class of what a cell holds."""
    return f"{held.file.path}:{held.name}" if isinstance(held, OwnClass) else held
