"""Kernel tests always run with poisoned fresh memory."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _poisoned_memory(poisoned_memory):
    return poisoned_memory
