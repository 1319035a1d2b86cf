"""Helpers for the pages of `batchgen view`: templates, style sheets, pages for errors, and values
of URL queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from batchgen.pages.rows.row_page import CSS
from batchgen.pages.viewer.rows.row_id_index import StillSearching
from batchgen.pages.viewer.server import Response
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.text.safe_text import templates

_STATIC = Path(__file__).parent / "static"
_FILES = {
    path.name: path for path in (*CSS, *(_STATIC / n for n in ("view.css", "keys.js", "icon.svg")))
}
_KINDS = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_MOST_DIGITS = 18
"""Longer numbers are refused, before Python spends time on reading them."""
_LARGEST = 2**31
"""Larger than the `row_index` of any row. Larger numbers in queries are cut to this one."""
Query = Mapping[str, str]
"""The values in the query of a URL, by name."""
Html = Callable[..., Response]
"""`html_page` with those values already set that all pages need, such as the jobs."""


class NotThere(Exception):
    """The page that a request asks for does not exist; the message says why. The answer is 404."""


def static_file(name: str) -> Response | None:
    """Return a style sheet, the script or the icon; None for other names."""
    file = _FILES.get(name)
    return None if file is None else Response(file.read_bytes(), _KINDS[file.suffix])


def html_page(template: str, status: HTTPStatus = HTTPStatus.OK, **values: Any) -> Response:
    """Render the template `<template>.html.jinja` with these values."""
    page = templates("batchgen.pages.viewer").get_template(f"{template}.html.jinja").render(values)
    return Response(page.encode("utf-8", "replace"), status=status)


def answer(make: Callable[[Query], Response] | None, query: Query, html: Html) -> Response:
    """Answer a request with a page, or with a message and a status code if that fails.

    Args:
        make: makes the page from the query; None if there is no page of that name.
        html: makes the page that shows a message.
    """

    def message(text: str, status: HTTPStatus) -> Response:
        return html("message", status, title=status.phrase, text=text)

    try:
        if make is None:
            raise NotThere("There is no such page.")
        return make(query)
    except NotThere as error:
        return message(str(error), HTTPStatus.NOT_FOUND)
    except StillSearching as error:
        text = f"{error.searched:,} rows were searched for the row_id. Continuing …"
        return html("message", title="Still searching", again=True, text=text)
    except ConfigError as error:
        return message(str(error), HTTPStatus.BAD_REQUEST)
    except JobError as error:
        return message(str(error), HTTPStatus.INTERNAL_SERVER_ERROR)
    except FileNotFoundError as error:
        text = f"{error.filename} has been deleted: start batchgen view again."
        return message(text, HTTPStatus.NOT_FOUND)


def whole_number(query: Query, key: str, default: int | None = None) -> int:
    """Return the value `key` of a query as a number from 0 to _LARGEST.

    Raises:
        ConfigError: it is not a whole number, or it is missing and there is no default.
    """
    value = query.get(key)
    if value is None and default is not None:
        return default
    if value is None or not (value.isascii() and value.isdecimal()) or len(value) > _MOST_DIGITS:
        raise ConfigError(f"{key} must be a whole number")
    return min(int(value), _LARGEST)


def redirect(page: str, query: Mapping[str, Any] | None = None) -> Response:
    """Return a redirect (303) to another page."""
    target = f"{page}?{urlencode(query)}" if query else page
    return Response(b"", status=HTTPStatus.SEE_OTHER, location=target)
