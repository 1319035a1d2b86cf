"""The pages of `batchgen view FOLDER`: a list of the jobs below a folder, a leaderboard, and the
pages of each job.

A job's key is a short text that stands for it in URLs: `KEY/PAGE` is a page of one job, and
`KEY-KEY/PAGE` a page of two jobs side by side.
"""

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
"""The number of sites (the pages of a job or of two) that are kept in memory, with the ids of rows
that they have found."""
_SHOWN_NAMES = 20
"""The maximum number of names in the remarks below the list of jobs."""


class FolderSite:
    """All pages about the jobs below a folder.

    Args:
        name: the folder as the user named it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = folder.resolve().name if name in (".", "./") else name
        self._lock = Lock()
        self._sites: OrderedDict[str, Site] = OrderedDict()
        self._board = Leaderboard()
        # Pages without a job: `above` is the link to the list of jobs, which is None there.
        self._html = partial(html_page, jobs=(), flips=None, above=None)

    def respond(self, page: str, query: Query) -> Response:
        """Answer a request. `page` is the path of the URL without its first slash."""
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
        """Return the list of jobs. The query sorts and filters it; see `listed_jobs`."""
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
        """Return the page that ranks jobs with the same questions by their scores."""
        jobs = jobs_below(self._folder).jobs
        keys = {str(job.path): job.key for job in jobs}
        boards = self._board.boards(jobs)
        return self._html("leaderboard", name=self._name, boards=boards, keys=keys)

    def _pair(self, query: Query) -> Response:
        """Redirect to the pages of the jobs `a` and `b` of the query, side by side."""
        keys = [query.get("a", ""), query.get("b", "")]
        if not all(keys) or keys[0] == keys[1]:
            raise NotThere("Choose one job as A and another one as B.")
        return redirect("-".join(keys) + "/")

    def _site(self, keys: str) -> Site:
        """Return the pages of the jobs with these keys, and keep them as the last ones used.

        Args:
            keys: a key, or two with `-` in between.

        Raises:
            NotThere: there is no such job (any more), or a job cannot be shown.
        """
        with self._lock:
            site = self._sites.pop(keys, None)
            if site is None:
                site = self._open_site(keys.split("-"))
            self._sites[keys] = site
            if len(self._sites) > _MOST_SITES:
                self._sites.popitem(last=False)  # the one whose last use is the longest ago
            return site

    def _open_site(self, keys: list[str]) -> Site:
        """Open the pages of one job or of two different jobs. Raises NotThere as `_site`."""
        known = {job.key: job for job in jobs_below(self._folder).jobs}
        jobs = [known.get(key) for key in keys]
        if None in jobs or len(jobs) > 2 or len(set(keys)) < len(keys):
            raise NotThere("There is no such job here: choose one in the list of jobs.")
        return Site([_view(job) for job in jobs if job is not None], above="../")


def _view(job: JobBelow) -> JobView:
    """Open a job. Raises NotThere if it cannot be shown."""
    if fault := job.fault or config_fault(job.path):
        raise NotThere(f"{job.name} cannot be shown: {fault}.")
    return JobView(JobFolderReader(job.path), job.name)
