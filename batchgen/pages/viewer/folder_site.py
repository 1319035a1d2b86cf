"""The pages of `batchgen view FOLDER`: a list of the jobs below a folder, and each job's own."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from pathlib import Path
from threading import Lock

from batchgen.pages.report.funnel import HEADER
from batchgen.pages.report.pipeline_facts import PipelineFacts
from batchgen.pages.viewer.html import NotThere, Query, answer, html_page, redirect, static_file
from batchgen.pages.viewer.job_view import JobView
from batchgen.pages.viewer.jobs_below import DEEPEST, JobBelow, config_fault, jobs_below
from batchgen.pages.viewer.leaderboard import Leaderboard
from batchgen.pages.viewer.listed_jobs import COLUMNS, NUMBERS, listed_jobs
from batchgen.pages.viewer.pages import Site
from batchgen.pages.viewer.server import Response
from batchgen.storage.folder.read_job import JobFolderReader

_MOST_SITES = 8
"""Sites that are kept; each knows the ids of the rows of its jobs."""
_SHOWN_NAMES = 20


class FolderSite:
    """All pages over the jobs below a folder.

    Pages of a job have its key and a slash before their names; pages of two jobs side by side have
    both keys with `-` in between.

    Args:
        name: the folder as the user named it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = folder.resolve().name if name in (".", "./") else name
        self._lock = Lock()
        self._sites: OrderedDict[str, Site] = OrderedDict()
        self._board = Leaderboard()
        self._html = partial(html_page, jobs=(), flips=None, above=None)

    def respond(self, page: str, query: Query) -> Response:
        """The answer to a request for a page."""
        keys, slash, rest = page.partition("/")
        if (file := static_file(rest if slash else page)) is not None:
            return file
        if not slash:
            pages = {"": self._list, "pair": self._pair, "leaderboard": self._leaderboard}
            make = pages.get(page)
            return answer(make, query, self._html)
        html = partial(self._html, above="../")
        return answer(lambda query: self._site(keys).respond(rest, query), query, html)

    def _list(self, query: Query) -> Response:
        jobs = jobs_below(self._folder)
        pipeline = PipelineFacts.of(self._folder)
        return self._html(
            "jobs",
            name=self._name,
            found=jobs,
            listed=listed_jobs(jobs.jobs, query),
            columns=COLUMNS,
            numbers=NUMBERS,
            header=HEADER,
            pipeline=pipeline,
            keys={job.name: job.key for job in jobs.jobs if not job.fault},
            deepest=DEEPEST,
            can_pair=sum(not job.fault for job in jobs.jobs) > 1,
            most=_SHOWN_NAMES,
        )

    def _leaderboard(self, query: Query) -> Response:
        jobs = jobs_below(self._folder).jobs
        keys = {str(job.path): job.key for job in jobs}
        boards = self._board.boards(jobs)
        return self._html("leaderboard", name=self._name, boards=boards, keys=keys)

    def _pair(self, query: Query) -> Response:
        """Go to two jobs side by side."""
        keys = [query.get("a", ""), query.get("b", "")]
        if not all(keys) or keys[0] == keys[1]:
            raise NotThere("Choose one job as A and another one as B.")
        return redirect("-".join(keys) + "/")

    def _site(self, keys: str) -> Site:
        """The pages of a job, or of two.

        Raises:
            NotThere: there is no such job any more, or nothing can be shown of it.
        """
        with self._lock:
            site = self._sites.pop(keys, None)
            if site is None:
                site = self._open_site(keys.split("-"))
            self._sites[keys] = site
            if len(self._sites) > _MOST_SITES:
                self._sites.popitem(last=False)
            return site

    def _open_site(self, keys: list[str]) -> Site:
        known = {job.key: job for job in jobs_below(self._folder).jobs}
        jobs = [known.get(key) for key in keys]
        if None in jobs or len(jobs) > 2 or len(set(keys)) < len(keys):
            raise NotThere("There is no such job here: choose one in the list of jobs.")
        return Site([_view(job) for job in jobs if job is not None], above="../")


def _view(job: JobBelow) -> JobView:
    if fault := job.fault or config_fault(job.path):
        raise NotThere(f"{job.name} cannot be shown: {fault}.")
    return JobView(JobFolderReader(job.path), job.name)
