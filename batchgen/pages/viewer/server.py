"""The HTTP server of `batchgen view`. It answers only GET and HEAD, and only to this machine.

The server shows texts of models and of strangers' data sets in a browser that has other pages open.
Therefore:

- It listens on 127.0.0.1. A foreign page could still reach it in two ways, and both are refused:
  through a host name that points to 127.0.0.1 (DNS rebinding), which the Host header reveals; or by
  loading a page of the server as a script or an image, which Sec-Fetch-Site reveals.
- Every address begins with a random key, which only this terminal shows, because other users of the
  machine can reach the port.
- Nothing can be written, and no path of a request is a path of a file.
- The Content-Security-Policy allows only the viewer's own style sheets and its one script. Text
  that gets into a page unescaped therefore cannot do anything.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from batchgen.util.errors import ConfigError

ADDRESS = "127.0.0.1"
LONGEST_TARGET = 8192
"""The most bytes of the request target, the path and query in the first line of a request."""
_SECONDS = 30.0
"""The seconds after which a silent connection is closed."""
_MOST_KEYS = 40
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Response:
    """The answer to a request."""

    body: bytes
    kind: str = "text/html; charset=utf-8"  # the Content-Type
    status: HTTPStatus = HTTPStatus.OK
    location: str | None = None  # the target of a redirect
    policy: str = POLICY
    file_name: str | None = None  # of a download; letters, digits, `-`, `_` and `.`
    chunks: Iterator[bytes] | None = None  # a body that is generated while it is sent


Respond = Callable[[str, dict[str, str]], Response]
"""Maps the path of a page, below the key, and its query to a response."""


class ViewServer(ThreadingHTTPServer):
    """Answers requests from this machine, each in a thread of its own.

    Args:
        respond: makes the responses. Several threads call it.
        port: the port to listen on; 0 for a free one.

    Attributes:
        key: the random first part of every path.
        url: the address of the first page.

    Raises:
        ConfigError: the port cannot be opened.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, respond: Respond, port: int = 0) -> None:
        self.respond = respond
        self.key = secrets.token_urlsafe(12)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"view: port {port} cannot be opened ({error}): leave out --port to get a free one"
            ) from None
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}
        if self.server_port == 80:  # browsers omit the default port
            self.hosts |= {ADDRESS, "localhost"}
        self.url = f"http://{ADDRESS}:{self.server_port}/{self.key}/"

    def server_bind(self) -> None:
        """Bind the socket without the DNS lookup of this machine's name that the base class
        does."""
        socket.socket.bind(self.socket, self.server_address)
        self.server_name, self.server_port = ADDRESS, self.socket.getsockname()[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that disconnects during a response; report other errors."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Handles one connection, which is closed after its response."""

    server: ViewServer
    server_version, sys_version = "batchgen", ""
    timeout = _SECONDS

    def do_GET(self) -> None:
        self._send(self._response())

    def do_HEAD(self) -> None:
        self._send(self._response())

    def parse_request(self) -> bool:
        """Read the request. A request that must be refused is answered here."""
        if not super().parse_request():
            return False
        if refusal := self._refusal():
            self.send_error(*refusal)
            return False
        return True

    def _refusal(self) -> tuple[HTTPStatus, str] | None:
        """Return why the request must be refused; None if it may be answered."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            return HTTPStatus.FORBIDDEN, (
                f"this server answers only at {self.server.url.rsplit('/', 2)[0]}"
            )
        if self.command not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, "this server only reads"
        if len(self.path) > LONGEST_TARGET:
            return HTTPStatus.REQUEST_URI_TOO_LONG, "the address is too long"
        is_same_site = self.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
        if not is_same_site and self.headers.get("Sec-Fetch-Dest") != "document":
            return HTTPStatus.FORBIDDEN, "pages from elsewhere cannot load this"
        return None

    def _response(self) -> Response:
        try:
            target = urlsplit(self.path)
        except ValueError:  # an unmatched bracket, which reads as a part of an IPv6 address
            return _plain(HTTPStatus.BAD_REQUEST, "This is not a valid address.")
        key, slash, page = target.path.removeprefix("/").partition("/")
        if not slash or not hmac.compare_digest(key.encode(), self.server.key.encode()):
            return _plain(
                HTTPStatus.NOT_FOUND,
                "Open the address that batchgen view has printed, with its key.",
            )
        try:
            query = dict(parse_qsl(target.query, max_num_fields=_MOST_KEYS))
        except ValueError:
            return _plain(HTTPStatus.BAD_REQUEST, "The address has too many keys.")
        return self.server.respond(page, query)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with a line of plain text, where the base class would send HTML."""
        status = HTTPStatus(code)
        self.close_connection = True
        self._send(_plain(status, message or status.phrase))

    def _send(self, response: Response) -> None:
        if response.chunks is not None:
            # Chunked transfer lets a browser detect a download that ended early.
            self.protocol_version = "HTTP/1.1"
        self.send_response(response.status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", response.policy)
        self.send_header("Content-Type", response.kind)
        if response.chunks is None:
            self.send_header("Content-Length", str(len(response.body)))
        else:
            self.send_header("Connection", "close")
            self.send_header("Transfer-Encoding", "chunked")
        if response.file_name is not None:
            name = f'attachment; filename="{response.file_name}"'
            self.send_header("Content-Disposition", name)
        if response.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        if response.location is not None:
            self.send_header("Location", response.location)
        self.end_headers()
        if self.command == "HEAD":
            return
        if response.chunks is None:
            self.wfile.write(response.body)
            return
        for chunk in filter(None, response.chunks):  # an empty chunk would end the body
            self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: the terminal shows the address."""


def _plain(status: HTTPStatus, text: str) -> Response:
    return Response(f"{text}\n".encode(), "text/plain; charset=utf-8", status)
