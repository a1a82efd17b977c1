"""A connection to a server that can be cut: what a browser sees when a server restarts."""

import contextlib
import socket
import threading
from collections.abc import Iterator


class Cable:
    """Forwards bytes between a client and a server until it is cut."""

    def __init__(self, port: int) -> None:
        """Forward to a port of this machine."""
        self._port = port
        self._ends: list[socket.socket] = []
        self._listener = self._listen(0)
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=_pass, args=(source, target), daemon=True).start()

    def cut(self) -> None:
        """Close every connection and refuse new ones."""
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._ends.clear()

    def mend(self) -> None:
        """Accept connections again at the same address."""
        self._listener = self._listen(int(self.address.rpartition(":")[2]))


def _pass(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def cable_to(port: int) -> Iterator[Cable]:
    """Forward to a port of this machine while the context is open."""
    cable = Cable(port)
    try:
        yield cable
    finally:
        cable.cut()
