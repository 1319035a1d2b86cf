"""What the server of `batchgen view` answers to, and how it keeps strangers out."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPConnection, HTTPResponse, IncompleteRead

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.pages.viewer.server import LONGEST_TARGET, Response, ViewServer
from batchgen.util.errors import ConfigError

Headers = dict[str, str]


def breaks_off() -> Iterator[bytes]:
    yield b"one"
    raise ConnectionError("the disk is gone")


@pytest.fixture(scope="module")
def server() -> Iterator[ViewServer]:
    """A server whose pages say which page they are; `to` redirects, `fails` raises."""

    def respond(page: str, query: dict[str, str]) -> Response:
        if page == "to":
            return Response(b"", status=HTTPStatus.SEE_OTHER, location="row?n=1")
        if page == "file":
            return Response(b"", "text/csv", file_name="a.csv", chunks=iter([b"one", b"", b"two"]))
        if page == "broken":
            return Response(b"", "text/csv", file_name="a.csv", chunks=breaks_off())
        assert page != "fails"
        return Response(f"page {page} {sorted(query.items())}".encode())

    with ViewServer(respond) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(
    server: ViewServer, target: str, method: str = "GET", **headers: str
) -> tuple[HTTPResponse, bytes]:
    """Ask for a path below the key, with further headers (`_` for `-`)."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, f"/{server.key}/{target}", headers=given)
    response = connection.getresponse()
    return response, response.read()


def test_pages_and_their_headers(server: ViewServer) -> None:
    response, body = ask(server, "rows?text=%3Cb%3E&from=3&empty=")
    assert response.status == 200 and body == b"page rows [('from', '3'), ('text', '<b>')]"
    assert response.headers["Content-Security-Policy"].startswith("default-src 'none'; ")
    assert "unsafe" not in response.headers["Content-Security-Policy"]
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Referrer-Policy"] == "no-referrer"
    assert response.headers["X-Frame-Options"] == "DENY"
    assert response.headers["Cache-Control"] == "no-store"
    assert "Python" not in response.headers["Server"]
    head, nothing = ask(server, "rows", "HEAD")
    assert (head.status, nothing) == (200, b"") and head.headers["Content-Length"] == "12"
    moved, _ = ask(server, "to")
    assert (moved.status, moved.headers["Location"]) == (303, "row?n=1")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_nothing_can_be_written(server: ViewServer, method: str) -> None:
    response, body = ask(server, "rows", method)
    assert (response.status, body) == (405, b"this server only reads\n")
    assert response.headers["Allow"] == "GET, HEAD"
    assert response.headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost:1", "", "[::1]:{port}"]
)
def test_other_hosts_are_refused(server: ViewServer, host: str) -> None:
    response, body = ask(server, "rows", Host=host.format(port=server.server_port))
    assert response.status == 403 and b"page" not in body and server.key.encode() not in body


@pytest.mark.parametrize("host", ["localhost:{port}", "LOCALHOST:{port}", "127.0.0.1:{port}"])
def test_own_hosts_are_not(server: ViewServer, host: str) -> None:
    assert ask(server, "rows", Host=host.format(port=server.server_port))[0].status == 200


def raw(server: ViewServer, request: bytes) -> bytes:
    """The answer to bytes as they are."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as sent:
        sent.sendall(request)
        sent.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: sent.recv(65536), b""))


def test_requests_that_are_none(server: ViewServer) -> None:
    own = f"Host: 127.0.0.1:{server.server_port}\r\n".encode()
    page = f"GET /{server.key}/rows HTTP/1.1\r\n".encode()
    assert b" 200 " in raw(server, page + own + b"\r\n")
    assert b" 403 " in raw(server, page + b"\r\n")
    assert b" 403 " in raw(server, page + own + own + b"\r\n")
    for line in (b"nonsense here", b"GET / HTTP/x", b"GET /" + server.key.encode() + b"/rows"):
        assert b"page" not in raw(server, line + b"\r\n\r\n"), line
    for line in (b"GET /" + b"x" * 70_000, b"GET /" + b"x" * LONGEST_TARGET):
        assert b" 414 " in raw(server, line + b" HTTP/1.1\r\n" + own + b"\r\n")
    many = b"".join(b"X-%d: 1\r\n" % i for i in range(200))
    assert b" 431 " in raw(server, page + own + many + b"\r\n")
    assert raw(server, b"") == b""


def test_the_address_has_a_key(server: ViewServer) -> None:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    for path in ("/", "/rows", f"/{server.key}", f"/{server.key[:-1]}/rows", "/%FF/rows", "//"):
        connection.request("GET", path)
        response = connection.getresponse()
        assert (response.status, b"page" in response.read()) == (404, False), path
    other = ViewServer(server.respond)
    other.server_close()
    assert other.key != server.key and len(server.key) >= 16


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Dest": "script"}, 403),
        ({"Sec_Fetch_Site": "same-site", "Sec_Fetch_Dest": "image"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Dest": "document"}, 200),
        ({"Sec_Fetch_Site": "same-origin", "Sec_Fetch_Dest": "style"}, 200),
    ],
)
def test_pages_from_elsewhere_load_nothing(
    server: ViewServer, headers: Headers, status: int
) -> None:
    assert ask(server, "rows", **headers)[0].status == status


def test_too_many_keys(server: ViewServer) -> None:
    query = "&".join(f"k{i}=1" for i in range(100))
    assert ask(server, f"rows?{query}")[0].status == 400


def test_a_page_that_fails_ends_no_more_than_itself(
    server: ViewServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConnectionError):
        ask(server, "fails")
    assert "AssertionError" in capfd.readouterr().err
    assert ask(server, "rows")[0].status == 200


def test_a_port_that_is_taken(server: ViewServer) -> None:
    with pytest.raises(ConfigError, match=f"view: port {server.server_port} cannot be opened"):
        ViewServer(server.respond, server.server_port)


def test_a_file_that_is_made_while_it_is_sent(server: ViewServer) -> None:
    """Who gets it can tell whether it is whole."""
    response, body = ask(server, "file")
    assert body == b"onetwo" and response.headers["Transfer-Encoding"] == "chunked"
    assert response.headers["Content-Disposition"] == 'attachment; filename="a.csv"'
    assert "Content-Length" not in response.headers
    assert ask(server, "file", "HEAD")[1] == b""
    with pytest.raises(IncompleteRead):
        ask(server, "broken")


@pytest.fixture
def faults(server: ViewServer, monkeypatch: pytest.MonkeyPatch) -> list[BaseException | None]:
    """Gets what a request has raised."""
    found: list[BaseException | None] = []
    monkeypatch.setattr(server, "handle_error", lambda *_: found.append(sys.exception()))
    return found


@pytest.mark.parametrize("target", ["http://[", "http://[::1", "http://a]b/", "http://[a]b/"])
def test_what_is_no_address_is_refused(
    server: ViewServer, faults: list[BaseException | None], target: str
) -> None:
    host = f"localhost:{server.server_port}"
    request = f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"
    assert raw(server, request.encode("latin-1")).split()[1] == b"400"
    assert not faults


PIECES = (
    b"GET |HEAD |/|http://|[|]|:|@|?|#|%|%ff|&|=|\xff|\xe2\x84\x80|\x00|\t| |HTTP/1.1|HTTP/\xb2.1|"
    b"\r\n|9|Host: HERE\r\n|Sec-Fetch-Site: |Content-Length: -1\r\n|KEY/rows?n="
).split(b"|")
BYTES = st.lists(st.sampled_from(PIECES), max_size=14).map(b"".join)


@settings(
    max_examples=settings().max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(BYTES, BYTES, BYTES)
def test_no_bytes_raise(
    server: ViewServer,
    faults: list[BaseException | None],
    target: bytes,
    version: bytes,
    headers: bytes,
) -> None:
    sent = b"GET " + target + b" HTTP/1.1" + version + b"\r\nHost: HERE\r\n" + headers + b"\r\n\r\n"
    sent = sent.replace(b"HERE", f"localhost:{server.server_port}".encode())
    raw(server, sent.replace(b"KEY", server.key.encode()))
    assert not faults, sent
