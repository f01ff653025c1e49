"""Classes in files of a user's own, named as ``path/to/file.py:ClassName``."""

import hashlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any


def load_class(spec: str, kind: str, base: type) -> Any:
    """The class that ``spec`` names, a subclass of ``base`` without abstract methods.

    kind: what errors call it; its last word is the argument.  Raises ValueError that names the
    argument and ``spec`` for a file that is absent or cannot be imported, and for any other class.
    """
    argument = f"{kind.split()[-1]}={spec!r}"
    path, _, class_name = spec.rpartition(":")
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"{argument}: there is no file {path}")
    # The module name is unique to the file and its content.  So classes can be pickled, and loading
    # an unchanged file again gives the class that is already compiled.
    digest = hashlib.sha256(str(file).encode() + file.read_bytes()).hexdigest()[:16]
    module_name = f"user_file_{file.stem}_{digest}"
    module = sys.modules.get(module_name)
    if module is None:
        module_spec = importlib.util.spec_from_file_location(module_name, file)
        assert module_spec is not None
        assert module_spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(module_spec)
        try:
            module_spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            raise ValueError(
                f"{argument}: importing {path} failed: {type(error).__name__}: {error}"
            ) from error
    found = getattr(module, class_name, None)
    if not (inspect.isclass(found) and issubclass(found, base)):
        names = [
            n
            for n, c in vars(module).items()
            if inspect.isclass(c) and issubclass(c, base) and c.__module__ == module_name
        ]
        raise ValueError(
            f"{argument}: {path} has no {kind} class {class_name}; "
            f"it defines {', '.join(names) or 'none'}"
        )
    return defined(argument, found)


def defined(argument: str, found: Any) -> Any:
    """Return ``found``.  ValueError, which begins with ``argument``, if a method is abstract."""
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ValueError(f"{argument}: {found.__name__} does not define {missing}")
    return found
