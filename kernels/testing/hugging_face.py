"""Import transformers although this repository's `kernels` has the name of a package it uses."""

import importlib.util
import threading
from types import ModuleType

_LOCK = threading.Lock()


def import_transformers() -> ModuleType:
    """Import transformers as if no package `kernels` were installed.

    transformers imports layers from Hugging Face's `kernels` if it finds a module of this name and
    metadata of version 0.18. The module it finds beside this repository is ours, which has no such
    layers. transformers caches its answer, so it is asked once while its search finds nothing.
    Imports do not use this search: other threads may import `kernels` meanwhile.

    Raises ImportError where transformers is not installed.
    """
    import transformers
    from transformers.utils.import_utils import is_kernels_available

    with _LOCK:
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, package=None: (
            None if name == "kernels" else find(name, package)
        )
        try:
            is_kernels_available()
        finally:
            importlib.util.find_spec = find
    return transformers
