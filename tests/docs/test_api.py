"""The API pages: `make docs` resolves every annotation of what it documents."""

from __future__ import annotations

import typing

import pytest

import cache
import models


@pytest.mark.parametrize("module", [cache, models], ids=lambda module: module.__name__)
def test_pdoc_can_resolve_the_fields_of_named_tuples(module):
    """pdoc looks names up in the module that exports a class, not in the one that defines it."""
    exported = [getattr(module, name) for name in module.__all__]
    named_tuples = [x for x in exported if isinstance(x, type) and hasattr(x, "_fields")]
    assert named_tuples
    for named_tuple in named_tuples:
        typing.get_type_hints(named_tuple.__new__, globalns=vars(module))
