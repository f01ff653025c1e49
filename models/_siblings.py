"""Check that no other package hides a package of this repository."""

import importlib.util
from pathlib import Path


def check_siblings(root: Path, *names: str) -> None:
    """Raise ImportError unless Python imports each package ``names`` from the folder ``root``."""
    for name in names:
        spec, ours = importlib.util.find_spec(name), root / name
        found = spec.origin if spec is not None else None
        if found is None or Path(found).resolve() != (ours / "__init__.py").resolve():
            raise ImportError(
                f"{name}: Python finds {found}, which hides the package in {ours}; rename it, or "
                "run the script from elsewhere"
            )
