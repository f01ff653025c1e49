"""Results of a step that change control flow. mask: the threads that they affect, None for all
active threads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Branch:
    """The threads branch to a label."""

    target: str
    mask: np.ndarray | None


@dataclass(frozen=True)
class Exit:
    """The threads exit."""

    mask: np.ndarray | None


@dataclass(frozen=True)
class Barrier:
    """The threads wait at a barrier for all other threads of their program."""

    mask: np.ndarray | None
