"""Reads pages of `batchgen view` without a server or a browser."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from posixpath import join
from urllib.parse import parse_qsl, urlsplit

from batchgen.pages.viewer.folder_site import FolderSite
from batchgen.pages.viewer.job_view import JobView
from batchgen.pages.viewer.pages import Site
from batchgen.pages.viewer.server import POLICY, Response
from batchgen.storage.folder.read_job import JobFolderReader


def site(*folders: Path) -> Site:
    return Site([JobView(JobFolderReader(folder), f"jobs/{folder.name}") for folder in folders])


def get(pages: Site | FolderSite, target: str) -> Response:
    """What a browser gets for a link, with its redirections."""
    parts = urlsplit(target)
    found = pages.respond(parts.path.removeprefix("./"), dict(parse_qsl(parts.query)))
    if found.location is None:
        return found
    return get(pages, join(parts.path.rpartition("/")[0], found.location))


class Page(HTMLParser):
    """A page as a browser reads it.

    Attributes:
        tags: the elements that it has.
        links: where its links go.
        text: what one reads.
    """

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        assert response.kind.startswith("text/html"), response
        self.feed(response.body.decode())
        self.links = [str(a["href"]) for tag, a in self.tags if tag == "a"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def read(pages: Site | FolderSite, target: str, status: int = 200) -> Page:
    response = get(pages, target)
    assert response.status == status, response.body.decode()
    assert response.policy == POLICY
    return Page(response)
