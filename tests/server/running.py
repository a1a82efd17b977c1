"""A server in its own process, as users start it, and plain HTTP to it."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A loaded machine may take long to import torch twice.
_PATIENCE_SECONDS = 120


@dataclass
class Reply:
    """An HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def ok(self) -> Any:
        """The JSON of a successful answer."""
        assert self.status == 200, self.body
        return self.json

    @property
    def text(self) -> str:
        """The text of a chat's first choice."""
        text: str = self.ok["choices"][0]["message"]["content"]
        return text

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events; asserts that the stream ends correctly."""
        parts = self.body.decode().split("\n\n")
        data = [part.removeprefix("data: ") for part in parts if part]
        assert data[-1] == "[DONE]"
        return [json.loads(text) for text in data[:-1]]

    @property
    def streamed_texts(self) -> list[str]:
        """The texts of a stream's choices, by index."""
        texts: dict[int, str] = {}
        for event in self.events:
            for choice in event["choices"]:
                piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
                texts[choice["index"]] = texts.get(choice["index"], "") + (piece or "")
        return [texts[index] for index in sorted(texts)]

    @property
    def named_events(self) -> list[dict[str, Any]]:
        """A stream's named events, whose names must equal their types; comments are omitted."""
        found = []
        for part in self.body.decode().split("\n\n"):
            lines = [line for line in part.splitlines() if not line.startswith(":")]
            if lines:
                name, data = lines
                found.append(json.loads(data.removeprefix("data: ")))
                assert name == f"event: {found[-1]['type']}"
        return found


def wait_until(is_so: Callable[[], object], what: Callable[[], str]) -> None:
    """Wait until a condition holds; fail after two minutes."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < end, what()
        time.sleep(0.02)


def wait_for_end(process_id: int) -> None:
    wait_until(lambda: not Path(f"/proc/{process_id}").exists(), lambda: "it outlives its server")


class RunningServer:
    """A server that has reported that it is ready."""

    def __init__(
        self, process: "subprocess.Popen[str]", ready_message: dict[str, str], log: list[str]
    ) -> None:
        self.process, self.ready_message, self._log = process, ready_message, log
        self.address = ready_message["address"]
        host, _, port = self.address.removeprefix("http://").rpartition(":")
        self.host, self.port = host, int(port)
        self.headers: dict[str, str] = {}

    @property
    def log(self) -> str:
        """The server's log so far."""
        return "".join(self._log)

    @property
    def engine_process(self) -> int:
        """The process id of the engine process."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        lines = {int(c): Path(f"/proc/{c}/cmdline").read_bytes() for c in children}
        return next(child for child, line in lines.items() if b"spawn_main" in line)

    def helper(self, module: str) -> int:
        """The process id of the helper process that runs a module's `main`."""
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for child in map(int, children.read_text(encoding="ascii").split()):
                if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                    return child
        raise AssertionError(f"no process runs {module}")

    def connect(self) -> http.client.HTTPConnection:
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return http.client.HTTPConnection(host, self.port, timeout=_PATIENCE_SECONDS)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """Send one request; a body that is not bytes is sent as JSON."""
        sent = dict(self.headers)
        if body is not None:
            sent["Content-Type"] = "application/json"
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = self.connect()
        with contextlib.closing(connection):
            connection.request(method, path, body, {**sent, **(headers or {})})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read())

    def post(self, path: str, **fields: Any) -> Reply:
        return self.ask("POST", path, fields)

    def chat(self, text: str = "hello", **fields: Any) -> Reply:
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", **{"messages": messages, **fields})

    def complete(self, prompt: Any = "abc", **fields: Any) -> Reply:
        return self.post("/v1/completions", prompt=prompt, **{"temperature": 0, **fields})

    @contextlib.contextmanager
    def streaming(self, text: str = "hello", **fields: Any) -> Iterator[http.client.HTTPResponse]:
        """Open a stream; leaving the context closes the connection."""
        connection = self.connect()
        body = {"messages": [{"role": "user", "content": text}], "stream": True, **fields}
        headers = {"Content-Type": "application/json", **self.headers}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        try:
            yield response
        finally:
            response.close()
            connection.close()

    def metric(self, name: str) -> float:
        """Return one of the server's metrics."""
        text = self.ask("GET", "/metrics").body.decode()
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    def wait_for(self, name: str, value: float) -> None:
        """Wait until a metric has a value."""
        wait_until(
            lambda: self.metric(name) == value,
            lambda: f"{name} is {self.metric(name)}, expected {value}",
        )

    def wait_until_ready(self) -> None:
        wait_until(lambda: self.ask("GET", "/ready").status == 200, lambda: self.log)

    def wait_for_log(self, text: str) -> None:
        """Wait until the log contains a text, which may appear after the answer."""
        wait_until(lambda: text in self.log, lambda: self.log)

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal and wait for the end."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(_PATIENCE_SECONDS)


@contextlib.contextmanager
def running_server(
    model: str | Path,
    *flags: str,
    cache: Path | None = None,
    module: str | None = None,
    **environment: str,
) -> Iterator[RunningServer]:
    """Start `tandem serve` or a module with its flags; stop it when the context is left."""
    if module is None:
        command = ["tandem.cli.main", "serve", str(model), "--port", "0", "--json"]
        flags = ("--threads", "2", *flags)
    else:
        command = [module, str(model)]
    if cache is not None:
        environment["TANDEM_CACHE"] = str(cache)
    process = subprocess.Popen(
        [sys.executable, "-m", *command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        line = process.stdout.readline()
        assert line, "".join(log) or process.wait()
        server = RunningServer(process, json.loads(line), log)
        if "TANDEM_API_KEY" in environment:
            server.headers["Authorization"] = f"Bearer {environment['TANDEM_API_KEY']}"
        yield server
        server.end()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()
