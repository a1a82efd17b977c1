"""Tests of `tandem pack --for-hub`, and of `tandem run ORG/NAME` from a local hub."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tandem.checkpoint.hub import HubOptions, find_model_path
from tandem.checkpoint.hub_sums import SUMS_FILE
from tandem.cli.main import main
from tandem.core.errors import ModelError
from tests.hf.tiny import save_tiny_checkpoint

COMMIT = "b" * 40
NAME = "owner/tiny-packed"


class _Hub(BaseHTTPRequestHandler):
    """Serves one model's directory as the hub does."""

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        folder: Path = self.server.folder  # type: ignore[attr-defined]
        path = self.path.partition("?")[0]
        headers = {"X-Repo-Commit": COMMIT}
        if path.startswith(f"/api/models/{NAME}"):
            tree = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": file.name}
                for file in folder.iterdir()
            ]
            about = {"id": NAME, "sha": COMMIT, "siblings": []}
            body = json.dumps(tree if "/tree/" in path else about).encode()
            headers["Content-Type"] = "application/json"
        elif (file := folder / path.rpartition("/")[2]).is_file():
            body = file.read_bytes()
            headers["ETag"] = f'"{hashlib.md5(body).hexdigest()}"'
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            is_cut = path.endswith(self.server.cut)  # type: ignore[attr-defined]
            self.wfile.write(body[: len(body) // 2] if is_cut else body)
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Do nothing."""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was packed for a hub."""
    folder = tmp_path_factory.mktemp("published")
    source = save_tiny_checkpoint(folder / "tiny")
    (source / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: owner/tiny\n---\n")
    (source / "LICENSE").write_text("a licence")
    target = folder / "tiny-int8"
    words = ["pack", str(source), "--for-hub", "--expert-dtype", "int8", "-o", str(target), "-q"]
    assert main(words) == 0
    return target


@pytest.fixture
def hub(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A local hub with a copy of that model, which tests may damage."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.folder, server.cut = tmp_path / "hub", " none"
    server.folder.mkdir()
    for file in packed.iterdir():
        (server.folder / file.name).write_bytes(file.read_bytes())
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + template[template.index("/{repo_id}") :]
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def find(tmp_path: Path) -> Path:
    return find_model_path(NAME, HubOptions(cache_dir=str(tmp_path / "cache")))


def test_a_folder_for_a_hub_has_a_card_and_the_sums_of_all_files(packed: Path) -> None:
    card = (packed / "README.md").read_text()
    assert card.startswith("---\nbase_model: owner/tiny\nlicense: apache-2.0\n")
    assert "| experts | int8-g128 | all |\n| linear layers | as they are | all |" in card
    assert "Neither losses nor speed" in card
    assert (packed / "LICENSE").read_text() == "a licence"
    lines = (packed / SUMS_FILE).read_text().splitlines()
    names = {file.name for file in packed.iterdir()} - {SUMS_FILE}
    found = {name: total for total, _, name in (line.partition("  ") for line in lines)}
    assert found.keys() == names
    for name, total in found.items():
        assert hashlib.sha256((packed / name).read_bytes()).hexdigest() == total


def test_a_card_is_written_again_with_what_was_measured(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quality = {
        "model": "x", "against": "/models/tiny", "tokens": 4096, "perplexity": 9.5,
        "reference_perplexity": 9.4, "kl_mean": 0.0016, "kl_p99": 0.02, "same_first_choice": 0.97,
    }  # fmt: skip
    speed = {
        "processor": "a CPU, 8 threads", "batch": 1, "prefill_tokens_per_second": 79.1,
        "decode_tokens_per_second": 17.0, "milliseconds": {},
    }  # fmt: skip
    words = ["pack", str(packed), "--for-hub"]
    for name, report in (("quality", quality), ("speed", speed)):
        (tmp_path / name).write_text(f"a table\n{json.dumps(report)}\n")
        words += ["--measured", str(tmp_path / name)]
    assert main(words) == 0
    card = (packed / "README.md").read_text()
    assert "against tiny: KL divergence 0.00160 nats" in card
    assert "on a CPU, 8 threads, batch 1: prefill 79 tok/s, decode 17.0 tok/s" in card
    assert card.startswith("---\nbase_model: owner/tiny\nlicense: apache-2.0\n")
    assert main([*words[:3], "--measured", str(packed / "config.json")]) == 2
    assert "is not a report; give what tandem quality" in capsys.readouterr().err


def test_a_published_model_is_compared_with_its_sums_once(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = find(tmp_path)
    monkeypatch.setattr("tandem.checkpoint.hub_sums._sum_of", lambda file: pytest.fail(str(file)))
    assert find(tmp_path) == path


def flip(folder: Path) -> None:
    """Change one byte of the experts."""
    file = next(folder.glob("tandem-experts-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def omit_file(folder: Path) -> None:
    """Upload all files but one."""
    (folder / "tandem-dense.safetensors").unlink()


def truncate(folder: Path) -> None:
    """Upload half of a file."""
    file = folder / "tandem-dense.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def name_outside(folder: Path) -> None:
    """Name a file outside the directory."""
    with (folder / SUMS_FILE).open("a") as file:
        file.write(f"{'0' * 64}  ../../../secret.json\n")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (flip, r"tandem-experts-0000.* does not match its SHA256SUMS and was removed"),
        (
            truncate,
            r"tandem-dense\.safetensors does not match its SHA256SUMS and was removed",
        ),
        (omit_file, r"lacks tandem-dense\.safetensors, which its SHA256SUMS names"),
        (name_outside, r"has a damaged SHA256SUMS"),
    ],
)
def test_a_damaged_publication_is_one_sentence_and_is_not_used(
    hub: Any, tmp_path: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    damage(hub.folder)
    for _ in range(2):  # what is in the cache is not used either
        with pytest.raises(ModelError, match=sentence) as raised:
            find(tmp_path)
        assert "\n" not in str(raised.value)


def test_a_download_that_breaks_off_is_one_sentence(
    hub: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.cut = "tandem-dense.safetensors"
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert main(["run", NAME, "-p", "x"]) == 2
    errors = capfd.readouterr().err
    assert f"{NAME} cannot be downloaded (" in errors
    assert "Traceback" not in errors
    hub.cut = " none"
    assert find(tmp_path).is_dir()
