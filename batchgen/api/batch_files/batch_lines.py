"""Reads the lines of an OpenAI batch file (JSON lines), each as a valid request or as a bad line
with a reason. `batch_job.py` uses this."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from batchgen.engine.constraint.json_schema.json_text import parse_unique_json
from batchgen.util.errors import ConfigError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
"""The URLs that a request may have."""
_PROMPTS = {CHAT: "messages", COMPLETIONS: "prompt"}
"""The key of a request body that holds the prompt, by the URL."""
MOST_BYTES = 2**26
"""The maximum number of bytes of a line. The contents of a longer line are not parsed."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A valid request, which becomes a row of the job."""

    custom_id: str
    url: str
    body: Mapping[str, Any]
    text: str  # the body as JSON


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not a valid request.

    Attributes:
        custom_id: the request's id, if the line has a valid one.
        code: the error code of the result line, such as `invalid_url`.
        message: the reason, with the line's number.
    """

    custom_id: str | None
    code: str
    message: str


class _Refused(Exception):
    """A line is not a valid request; `code` is the error code of its result line."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def batch_lines(path: Path) -> Iterator[BatchRequest | BadLine]:
    """Yield every line of a file except empty ones, in order.

    Raises:
        ConfigError: the file cannot be read.
    """
    seen: set[bytes] = set()
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MOST_BYTES + 1):
                number += 1
                is_long = len(line) > MOST_BYTES
                # Skip the rest of a line that is too long.
                while is_long and not line.endswith(b"\n") and line:
                    line = file.readline(MOST_BYTES)
                if is_long or line.strip():
                    yield _read(None if is_long else line, number, seen)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None


def _read(line: bytes | None, number: int, seen: set[bytes]) -> BatchRequest | BadLine:
    """Parse one line.

    Args:
        line: its bytes; None if the line is too long.
        number: its number in the file, from 1.
        seen: digests of the ids of earlier lines; the line's own is added.
    """
    custom_id: str | None = None
    try:
        if line is None:
            raise _Refused("invalid_json_line", f"has more than {MOST_BYTES:,} bytes")
        request = _parsed(line)
        custom_id = _custom_id(request)
        digest = blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in seen:
            raise _Refused(
                "duplicate_custom_id", f"custom_id {custom_id!r} is also that of an earlier line"
            )
        seen.add(digest)
        return _request(request, custom_id)
    except _Refused as error:
        return BadLine(custom_id, error.code, f"line {number}: {error}")


def _parsed(line: bytes) -> dict[str, Any]:
    """Parse a line as a JSON object, or raise `_Refused`."""
    try:
        request = parse_unique_json(line.decode("utf-8-sig"))
        json.dumps(
            request, ensure_ascii=False, allow_nan=False
        ).encode()  # fails for half of a UTF-16 pair
    except UnicodeError:
        raise _Refused(
            "invalid_json_line", "is not valid UTF-8, or has half of a UTF-16 pair"
        ) from None
    except RecursionError:
        raise _Refused("invalid_json_line", "is nested too deeply") from None
    except ValueError as error:
        raise _Refused("invalid_json_line", f"is not JSON: {error}") from None
    if not isinstance(request, dict):
        raise _Refused("invalid_json_line", "must be an object with custom_id, url and body")
    return request


def _custom_id(request: Mapping[str, Any]) -> str:
    """Return the id of a request, or raise `_Refused`."""
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise _Refused("missing_custom_id", f"custom_id must be a text, got {custom_id!r:.100}")
    return custom_id


def _request(request: Mapping[str, Any], custom_id: str) -> BatchRequest:
    """Check the method, URL and body of a request; raises `_Refused` for the first mistake."""
    if (method := request.get("method", "POST")) != "POST":
        raise _Refused("invalid_method", f"method must be POST, got {method!r:.100}")
    url, body = request.get("url"), request.get("body")
    if not isinstance(url, str) or url not in _PROMPTS:
        raise _Refused("invalid_url", f"url must be {CHAT} or {COMPLETIONS}, got {url!r:.100}")
    if not isinstance(body, dict):
        raise _Refused("invalid_body", f"body must be an object, got {body!r:.100}")
    other = next(key for key in _PROMPTS.values() if key != _PROMPTS[url])
    if body.get(_PROMPTS[url]) is None or body.get(other) is not None:
        raise _Refused(
            "invalid_body", f"the body of {url} must have {_PROMPTS[url]} and not {other}"
        )
    return BatchRequest(custom_id, url, body, json.dumps(body, ensure_ascii=False))
