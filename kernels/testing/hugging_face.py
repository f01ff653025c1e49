"""transformers, beside a package of ours that has the name of one it uses."""

from __future__ import annotations

import sys
from types import ModuleType


def import_transformers() -> ModuleType:
    """Import transformers as if no package `kernels` were installed.

    transformers imports layers from Hugging Face's `kernels` if it finds a module of this name and
    metadata of version 0.18. The module it finds beside this repository is ours, which has no such
    layers. transformers caches its answer, so hiding the module once is enough.

    Raises ImportError where transformers is not installed.
    """
    ours = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # importlib.util.find_spec then finds no module
    try:
        import transformers
        from transformers.utils.import_utils import is_kernels_available

        is_kernels_available()
    finally:
        del sys.modules["kernels"]
        if ours is not None:
            sys.modules["kernels"] = ours
    return transformers
