"""Tests of hub ids without a network: cached models load, others are a one-sentence error."""

from pathlib import Path

import pytest
from huggingface_hub import constants

import tandem
from tandem.checkpoint.gguf_choice import choose_gguf
from tandem.checkpoint.hub import HubOptions, find_model_path, local_models
from tandem.core.errors import ModelError
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import runtime_in

COMMIT = "a" * 40


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one downloaded model, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--owner--tiny"
    save_tiny_checkpoint(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return tmp_path / "hub"


def test_a_downloaded_model_loads_offline(hub_cache: Path) -> None:
    model = tandem.load("owner/tiny", hub_cache=hub_cache)
    assert len(runtime_in(model).store) > 0


def test_a_revision_is_found_by_its_commit(hub_cache: Path) -> None:
    options = HubOptions(revision=COMMIT, cache_dir=str(hub_cache))
    assert find_model_path("owner/tiny", options).name == COMMIT


def test_what_is_not_here_names_what_is(hub_cache: Path) -> None:
    assert local_models(str(hub_cache)) == ["owner/tiny"]
    with pytest.raises(ModelError, match=r"owner/other is not on this .* are owner/tiny"):
        tandem.load("owner/other", hub_cache=hub_cache)


def test_an_empty_cache_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="no models are here either"):
        tandem.load("owner/other", hub_cache=tmp_path / "nothing")


NAMES = [
    "README.md",
    "mmproj-F16.gguf",
    "Model-Q4_K_M.gguf",
    "Model-Q4_K_S.gguf",
    "Model-UD-Q4_K_XL.gguf",
    "BF16/Model-BF16-00001-of-00002.gguf",
    "BF16/Model-BF16-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("tag", "files"),
    [
        ("Q4_K_M", NAMES[2:3]),
        ("q4_k_s", NAMES[3:4]),
        ("UD-Q4_K_XL", NAMES[4:5]),
        ("Q4_K_XL", NAMES[4:5]),
        ("BF16", NAMES[5:]),
        ("Model-Q4_K_M.gguf", NAMES[2:3]),
    ],
)
def test_a_tag_chooses_the_files_of_one_model(tag: str, files: list[str]) -> None:
    assert choose_gguf("owner/tiny", NAMES, tag) == files


def test_a_tag_that_no_file_has_names_those_that_are_there() -> None:
    expected = r"no \.gguf file with 'Q4_K' in its name; it has Model-BF16, Model-Q4_K_M, "
    with pytest.raises(ModelError, match=expected):
        choose_gguf("owner/tiny", NAMES, "Q4_K")
    with pytest.raises(ModelError, match=r"no \.gguf file of a model; leave out :Q4_K"):
        choose_gguf("owner/tiny", ["model.safetensors", "mmproj.gguf"], "Q4_K")


def test_only_the_parts_of_the_tagged_model_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def fetch(name: str, *, allow_patterns: list[str], **_: object) -> str:
        fetched.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_, **__: NAMES)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert find_model_path("owner/tiny:BF16") == tmp_path / NAMES[5]
    assert fetched == NAMES[5:]


def test_a_tagged_file_that_was_downloaded_is_found_offline(hub_cache: Path) -> None:
    snapshot = hub_cache / "models--owner--tiny" / "snapshots" / COMMIT
    file = snapshot / "Model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    options = HubOptions(cache_dir=str(hub_cache))
    assert find_model_path("owner/tiny:Q4_K_M", options) == file
    with pytest.raises(ModelError, match=r"no \.gguf file with 'Q8_0'"):
        find_model_path("owner/tiny:Q8_0", options)
    with pytest.raises(ModelError, match=r"owner/other is not on this machine"):
        find_model_path("owner/other:Q8_0", options)


def test_a_repository_of_gguf_files_wants_their_type(hub_cache: Path) -> None:
    snapshot = hub_cache / "models--owner--tiny" / "snapshots" / COMMIT
    (snapshot / "config.json").unlink()
    with pytest.raises(ModelError, match=r"owner/tiny has no config\.json.*tiny:Q4_K_M$"):
        find_model_path("owner/tiny", HubOptions(cache_dir=str(hub_cache)))


def test_a_directory_of_gguf_files_names_them(tmp_path: Path) -> None:
    for name in ("mmproj-F16.gguf", "tiny-Q4_0.gguf", "tiny-Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"no config\.json but tiny-Q4_0\.gguf and 1 more; a GGUF"):
        find_model_path(tmp_path)
    with pytest.raises(ModelError, match=r"other\.gguf is not a directory or a \.gguf file"):
        find_model_path(tmp_path / "other.gguf")
