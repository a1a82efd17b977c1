"""Hub ids without a network: what is in the cache loads, and the rest is one sentence."""

from pathlib import Path

import pytest
from huggingface_hub import constants

import tandem
from tandem.checkpoint.hub import HubOptions, find_model_path, local_models
from tandem.core.errors import ModelError
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import runtime_in

COMMIT = "a" * 40


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds one downloaded model, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--somebody--tiny"
    save_tiny_checkpoint(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return tmp_path / "hub"


def test_a_downloaded_model_loads_offline(hub_cache: Path) -> None:
    model = tandem.load("somebody/tiny", hub_cache=hub_cache)
    assert len(runtime_in(model).store) > 0


def test_a_revision_is_found_by_its_commit(hub_cache: Path) -> None:
    options = HubOptions(revision=COMMIT, cache_dir=str(hub_cache))
    assert find_model_path("somebody/tiny", options).name == COMMIT


def test_what_is_not_here_names_what_is(hub_cache: Path) -> None:
    assert local_models(str(hub_cache)) == ["somebody/tiny"]
    with pytest.raises(ModelError, match=r"somebody/other is not on this .* are somebody/tiny"):
        tandem.load("somebody/other", hub_cache=hub_cache)


def test_an_empty_cache_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="no models are here either"):
        tandem.load("somebody/other", hub_cache=tmp_path / "nothing")
