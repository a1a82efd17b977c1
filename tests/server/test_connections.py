"""Tests of a client's cost before its request is complete: bytes, time, connections."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.server.bounded import BoundedServer, answer, bounded_server, one_answer

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
KEYED = HEAD + b"X-Key: key\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def bounded() -> Iterator[BoundedServer]:
    with bounded_server() as server:
        yield server


def send_until_closed(connection: socket.socket, data: bytes, most: int = 64 << 20) -> None:
    """Send the same bytes repeatedly; fails if the server accepts all of them."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most:
            connection.sendall(data)
            sent += len(data)
    assert sent < most


@pytest.mark.parametrize("start", [HEAD + b"X: ", b"GET /", HEAD, b"\r\n"], ids=repr)
def test_a_head_without_end_is_cut_off(bounded: BoundedServer, start: bytes) -> None:
    with bounded.connect() as connection:
        connection.sendall(start)
        filler = b"\r\n" if start == b"\r\n" else b"a: b\r\n" if start == HEAD else b"abcdef"
        send_until_closed(connection, filler * 10_000)
    bounded.wait_for_count(0)


@pytest.mark.parametrize("head", [b"A: b\r\n" * 200, b"A: " + b"b" * 70_000], ids=["many", "long"])
def test_a_head_that_is_too_large_is_told_so(bounded: BoundedServer, head: bytes) -> None:
    with bounded.connect() as connection:
        connection.sendall(HEAD + head)
        assert answer(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    "endless",
    [b"0\r\nA: " + b"b" * 65_000, b"0\r\n" + b"A: b\r\n" * 1000, b"1;" + b"a" * 65_000],
    ids=["trailer", "trailers", "extension"],
)
def test_what_surrounds_a_body_has_a_limit(bounded: BoundedServer, endless: bytes) -> None:
    with bounded.connect() as connection:
        connection.sendall(CHUNKED + endless)
        send_until_closed(connection, endless[-60_000:])


def test_a_body_in_small_chunks_is_taken(bounded: BoundedServer) -> None:
    with bounded.connect() as connection:
        connection.sendall(CHUNKED + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n")
        assert b"100000" in one_answer(connection)


@pytest.mark.parametrize("start", [b"", b"GET /", HEAD, HEAD + b"X: y"], ids=repr)
def test_a_head_has_so_much_time(bounded: BoundedServer, start: bytes) -> None:
    with bounded.connect() as connection:
        connection.sendall(start)
        bounded.wait_for_count(1)
        bounded.wait_for_bytes(len(start))
        bounded.pass_time(19)
        assert bounded.count() == 1
        if len(start) > 4:
            connection.sendall(b"z")  # its time began with its first byte
            bounded.wait_for_bytes(len(start) + 1)
        bounded.pass_time(2)
        found = answer(connection)
        assert found.startswith(b"HTTP/1.1 408 ") or not start


def test_a_body_has_time_by_its_length(bounded: BoundedServer) -> None:
    with bounded.connect() as slow, bounded.connect() as stopped:
        for connection in (slow, stopped):
            connection.sendall(KEYED.replace(b"GET", b"POST") + b"Content-Length: 20000\r\n\r\n")
        bounded.wait_for_count(2)
        for number in range(1, 20):
            slow.sendall(b"x" * 1000)
            bounded.wait_for_bytes(1000 * number, "_body_bytes")
            bounded.pass_time(1.5)
        assert answer(stopped).startswith(b"HTTP/1.1 408 ")
        slow.sendall(b"x" * 1000)
        assert b"20000" in one_answer(slow)


def test_the_rest_of_a_refused_body_is_read_for_a_while(bounded: BoundedServer) -> None:
    with bounded.connect() as connection:
        connection.sendall(POST.replace(b"/", b"/early", 1))
        one_answer(connection)
        bounded.pass_time(4)
        assert bounded.count() == 1
        bounded.pass_time(2)
        bounded.wait_for_count(0)


def test_an_answer_that_is_not_read_is_given_up(bounded: BoundedServer) -> None:
    with bounded.connect() as connection:
        connection.sendall(KEYED.replace(b"/", b"/large", 1) + b"\r\n")
        assert connection.recv(1)
        bounded.pass_time(1)
        for _ in range(3):
            rest = 8 << 20
            while rest:
                rest -= len(connection.recv(rest))
            bounded.pass_time(59)
            assert bounded.count() == 1

        def left_a_minute_later() -> int:  # more than once: bytes may still be on their way
            bounded.now += 61
            bounded.connections.sweep()
            return len(bounded.connections)

        bounded.wait_for(left_a_minute_later, 0)


def test_an_answer_may_take_any_time(bounded: BoundedServer) -> None:
    with bounded.connect() as connection:
        connection.sendall(KEYED.replace(b"/", b"/long", 1) + b"\r\n")
        assert connection.recv(4096)
        bounded.pass_time(10_000)
        assert bounded.count() == 1


def test_few_requests_come_before_an_answer(bounded: BoundedServer) -> None:
    with bounded.connect() as connection:
        connection.sendall((KEYED + b"\r\n") * 10)
        found = b""
        while found.count(b"0\r\n\r\n") < 10:
            found += connection.recv(1 << 16)
        connection.sendall((KEYED.replace(b"/", b"/long", 1) + b"\r\n") * 10_000)
        answer(connection)
    bounded.wait_for_count(0)


def test_idle_strangers_make_room_for_who_has_the_key() -> None:
    with bounded_server(connections=8) as server, contextlib.ExitStack() as stack:
        mine = stack.enter_context(server.connect())
        mine.sendall(KEYED.replace(b"/", b"/long", 1) + b"\r\n")
        assert mine.recv(4096)
        kept = stack.enter_context(server.connect())
        kept.sendall(KEYED + b"\r\n")
        one_answer(kept)
        for number in range(100):
            stranger = stack.enter_context(server.connect())
            if number % 2:
                stranger.sendall(HEAD + b"\r\n")
            if number % 10 == 0:
                kept.sendall(KEYED + b"\r\n")
                one_answer(kept)
        server.wait_for_count(8)
        with server.connect() as another:
            another.sendall(KEYED + b"\r\n")
            one_answer(another)
        kept.sendall(KEYED + b"\r\n")
        one_answer(kept)


def test_strangers_that_read_nothing_make_room_too() -> None:
    with bounded_server(connections=4) as server, contextlib.ExitStack() as stack:
        for _ in range(20):
            stranger = stack.enter_context(server.connect())
            stranger.sendall(HEAD.replace(b"/", b"/large", 1) + b"\r\n")
        with server.connect() as mine:
            mine.sendall(KEYED + b"\r\n")
            one_answer(mine)


def test_when_all_are_answered_the_next_waits_for_none_of_them() -> None:
    with bounded_server(connections=2) as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            mine = stack.enter_context(server.connect())
            mine.sendall(KEYED.replace(b"/", b"/long", 1) + b"\r\n")
            assert mine.recv(4096)
        with server.connect() as late:
            assert answer(late) == b""
        assert server.count() == 2


LIFE = b"GET /health HTTP/1.1\r\nHost: x:80\r\n"
BY_CONNECTION, BY_APPLICATION = b'\r\n\r\n{"status":"ok"}', b"\r\n\r\n1\r\n0\r\n0\r\n\r\n"


def test_a_sign_of_life_needs_no_application(bounded: BoundedServer) -> None:
    with bounded.connect() as connection:
        for more in (b"\r\n", b"Content-Length: 3\r\n\r\nabc", b"\r\n"):
            connection.sendall(LIFE + more)
            reply = connection.recv(1 << 16)
            while not reply.endswith(b"}"):
                reply += connection.recv(1 << 16)
            assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
            assert reply.endswith(BY_CONNECTION)
        connection.sendall(LIFE + b"Connection: close\r\n\r\n")
        assert answer(connection).endswith(BY_CONNECTION)
    bounded.wait_for_count(0)


@pytest.mark.parametrize(
    "request_bytes",
    [
        LIFE + b"Origin: http://x\r\n",
        LIFE.replace(b"x:80", b"evil.example"),
        LIFE.replace(b"GET", b"PUT"),
        LIFE.replace(b"health", b"healthy"),
    ],
)
def test_other_requests_are_the_applications(request_bytes: bytes, bounded: BoundedServer) -> None:
    with bounded.connect() as connection:
        connection.sendall(request_bytes + b"Connection: close\r\n\r\n")
        assert answer(connection).endswith(BY_APPLICATION)


def test_of_many_signs_in_one_read_the_first_is_answered_at_once(bounded: BoundedServer) -> None:
    """The others wait for the event loop, and count against the connection's limit."""
    with bounded.connect() as connection:
        connection.sendall(2 * (LIFE + b"\r\n") + LIFE + b"Connection: close\r\n\r\n")
        found = answer(connection)
    assert found.count(BY_CONNECTION) == 1
    assert found.count(BY_APPLICATION) == 2
    assert found.index(BY_CONNECTION) < found.index(BY_APPLICATION)


def test_a_sign_after_a_running_request_waits_for_it(bounded: BoundedServer) -> None:
    with bounded.connect() as connection:
        connection.sendall(POST.replace(b"1000", b"5") + b"ab")
        bounded.wait_for_bytes(len(POST) - 3 + 2)
        connection.sendall(b"cde" + LIFE + b"Connection: close\r\n\r\n")
        found = answer(connection)
    assert found.index(b"\r\n\r\n1\r\n5\r\n") < found.index(BY_APPLICATION)
