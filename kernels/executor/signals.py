"""Results of a step that change the flow of control. mask: the threads concerned, None for all that
executed the instruction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Branch:
    """These threads go on at a label."""

    target: str
    mask: np.ndarray | None


@dataclass(frozen=True)
class Exit:
    """These threads end."""

    mask: np.ndarray | None


@dataclass(frozen=True)
class Barrier:
    """These threads wait for all others of their program."""

    mask: np.ndarray | None
