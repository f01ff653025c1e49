import re

import pytest
from huggingface_hub import constants

from models.hub import checkpoint_path, default_model


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
