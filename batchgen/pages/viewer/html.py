"""Helpers of the viewer's sites: pages from templates, style sheets, errors, and query values."""

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
_LARGEST = 2**31
"""Above the `row_index` of all rows."""
Query = Mapping[str, str]
Html = Callable[..., Response]
"""Makes a page: `html_page` with the values that all pages of a site need."""


class NotThere(Exception):
    """Raised where there is no such page, or nothing to show in it; the message says why."""


def static_file(name: str) -> Response | None:
    """A style sheet, the script or the icon; None for other names."""
    file = _FILES.get(name)
    return None if file is None else Response(file.read_bytes(), _KINDS[file.suffix])


def html_page(template: str, status: HTTPStatus = HTTPStatus.OK, **values: Any) -> Response:
    """A page of the template with this name."""
    page = templates("batchgen.pages.viewer").get_template(f"{template}.html.jinja").render(values)
    return Response(page.encode("utf-8", "replace"), status=status)


def answer(make: Callable[[Query], Response] | None, query: Query, html: Html) -> Response:
    """What a page answers, or why it cannot.

    Args:
        make: the page; None if there is none of that name.
        html: makes the page of a message.
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
    """A whole number in a query.

    Raises:
        ConfigError: it is none, or it is missing and there is no default.
    """
    value = query.get(key)
    if value is None and default is not None:
        return default
    if value is None or not (value.isascii() and value.isdecimal()) or len(value) > 18:
        raise ConfigError(f"{key} must be a whole number")
    return min(int(value), _LARGEST)


def redirect(page: str, query: Mapping[str, Any] | None = None) -> Response:
    """Go to another page."""
    target = f"{page}?{urlencode(query)}" if query else page
    return Response(b"", status=HTTPStatus.SEE_OTHER, location=target)
