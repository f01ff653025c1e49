"""The API pages: `make docs` resolves every annotation of what it documents."""

import typing

import cache
import models


def test_pdoc_can_resolve_the_fields_of_named_tuples():
    """pdoc looks names up in the module that exports a class, not in the one that defines it."""
    exported = [
        (module, getattr(module, name)) for module in (cache, models) for name in module.__all__
    ]
    named_tuples = [(m, x) for m, x in exported if isinstance(x, type) and hasattr(x, "_fields")]
    assert named_tuples
    for module, named_tuple in named_tuples:
        typing.get_type_hints(named_tuple.__new__, globalns=vars(module))
