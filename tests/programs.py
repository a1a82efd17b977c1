"""Starts `tandem` processes that need not import torch and Transformers again.

Each is forked from an interpreter that has imported them and done nothing else. The import takes
seconds, and the tests start a hundred programs. Files, terminal, signals, exit code and end are
those of a process. Only tests/hf/test_import.py and a few others need a cold start.

    python -m tests.programs IMPORTS    the interpreter: serves requests on file descriptor 0
"""

import atexit
import fcntl
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import termios
from collections.abc import Mapping, Sequence
from typing import Any

from tests.conftest import REPOSITORY

# Tiny tensors: a second thread would only spin, and on a busy machine spin for ever.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
COMMAND = "import sys; from tandem.cli.main import main; sys.exit(main(sys.argv[1:]))"
IMPORTS = """
import tandem, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
import transformers.models.mixtral.modeling_mixtral
for name in tandem.__all__: getattr(tandem, name)
"""
# The slow part of importing Transformers, without Transformers or Tandem.
TORCH_IMPORTS = "import torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor"
_MESSAGE_BYTES = 1 << 16


class Program:
    """A running program; leaving the context kills it if it has not ended."""

    def __init__(
        self,
        words: Sequence[str],
        files: Sequence[int],
        *,
        code: str = COMMAND,
        env: Mapping[str, str] = ENVIRONMENT,
        has_terminal: bool = False,
        imports: str = IMPORTS,
    ) -> None:
        """Start `python -c code words`; `files` are its input, output and errors.

        With `has_terminal` its input becomes its controlling terminal. Its interpreter has already
        run `imports`.
        """
        request = {
            "code": code, "words": list(words), "env": dict(env), "directory": os.getcwd(),
            "has_terminal": has_terminal,
        }  # fmt: skip
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        message = json.dumps(request).encode()
        socket.send_fds(_interpreter(imports), [message], [theirs.fileno(), *files])
        theirs.close()
        self._exit_code: int | None = None
        self.pid = self._receive(120)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has been waited for."""
        if self._exit_code is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float = 120) -> int:
        """Wait for the end; return the exit code in subprocess's form."""
        if self._exit_code is None:
            self._exit_code = self._receive(seconds)
        return self._exit_code

    def __enter__(self) -> "Program":
        """Return the program."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the program if it runs."""
        self.send_signal(signal.SIGKILL)
        self.wait()
        self._connection.close()

    def _receive(self, seconds: float) -> int:
        self._connection.settimeout(seconds)
        return int(self._connection.recv(_MESSAGE_BYTES))


def tandem(
    *words: str, stdin: str = "", env: Mapping[str, str] = ENVIRONMENT
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end with a pipe as its input."""
    return _run(words, stdin, env=env)


def python(
    code: str,
    *words: str,
    stdin: str = "",
    env: Mapping[str, str] = ENVIRONMENT,
    imports: str = IMPORTS,
) -> subprocess.CompletedProcess[str]:
    """Run Python code to its end, in an interpreter that has already run `imports`."""
    return _run(words, stdin, env=env, code=code, imports=imports)


def _run(words: Sequence[str], stdin: str, **options: Any) -> subprocess.CompletedProcess[str]:
    reading, writing = os.pipe()
    os.write(writing, stdin.encode(errors="surrogateescape"))
    os.close(writing)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        with Program(words, (reading, out.fileno(), errors.fileno()), **options) as program:
            os.close(reading)
            exit_code = program.wait()
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(words, exit_code, out.read(), errors.read())


@functools.cache
def _interpreter(imports: str) -> socket.socket:
    """Start an interpreter that programs are forked from; return its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.programs", imports],
        stdin=theirs.fileno(),
        cwd=REPOSITORY,
        env=ENVIRONMENT,
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve() -> dict[str, Any] | None:
    """Fork for each request; return the request in the child process."""
    connection = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        message, files, *_ = socket.recv_fds(connection, _MESSAGE_BYTES, 4)
        if not message:
            return None
        if os.fork() == 0:
            connection.close()
            _keep(socket.socket(fileno=files[0]))
            _take_files(files[1:])
            request: dict[str, Any] = json.loads(message)
            return request
        for file in files:
            os.close(file)


def _keep(connection: socket.socket) -> None:
    """Fork the program and return in it only; the parent reports its id and exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        connection.close()
        return
    connection.send(str(pid).encode())
    _, status = os.waitpid(pid, 0)
    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _take_files(files: Sequence[int]) -> None:
    """Make three open files this process's input, output and errors."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    out_buffering = 1 if os.isatty(1) else -1
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (open until the end, as Python's own)
    sys.stdout = open(1, "w", closefd=False, buffering=out_buffering)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115


def _become(request: dict[str, Any]) -> None:
    """Run the requested program, as `python -c` does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's shell ignores it
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["directory"])
    if request["has_terminal"]:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.argv = ["-c", *request["words"]]
    exec(request["code"], {"__name__": "__main__"})


if __name__ == "__main__":
    exec(sys.argv[1])
    gc.freeze()  # otherwise each program would copy all of it in a garbage collection at its end
    if (wanted := _serve()) is not None:
        _become(wanted)
