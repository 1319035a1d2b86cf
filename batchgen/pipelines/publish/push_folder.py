"""Pushes a folder to a data set of the hub, commit by commit, without uploading anything twice."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from logging import CRITICAL
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from batchgen.pipelines.publish.pushed_files import LocalFile, PushedFolder
from batchgen.util.errors import ConfigError, JobError

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

_T = TypeVar("_T")
SHARDS_IN_COMMIT = 100
_TRIES = 8
"""The most consecutive failures of a commit before the push ends."""
_MOST_WAIT = 60.0
_LOOK_SECONDS = 30.0
_CONFLICT = 412
_TRANSIENT = (408, 429, 500, 502, 503, 504)


class FolderPush:
    """The push of one folder into one repository.

    A commit names its parent, so two processes that push at once do not overwrite each other: the
    later one reads the repository again and continues. The repository is also read again after any
    failure, so a commit whose answer was lost is not made twice.

    Attributes:
        pushed, commits: how many files and commits were pushed.
    """

    def __init__(
        self,
        folder: PushedFolder,
        repo: str,
        *,
        private: bool,
        say: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Find or make the repository.

        Raises:
            ConfigError: nobody is logged in, the name is none, or the repository holds other rows.
            JobError: the hub refuses or cannot be reached.
        """
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.utils.logging import set_verbosity
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        set_verbosity(CRITICAL)
        if get_token() is None:
            raise ConfigError(
                "push: you are not logged in to the hub on this machine: run `hf auth login` "
                "first, with a token that may write"
            )
        self._folder, self._repo, self._say, self._sleep = folder, repo, say, sleep
        self._api: HfApi = HfApi(library_name="batchgen")
        self._known: dict[Path, tuple[tuple[int, int], str]] = {}
        self.pushed = self.commits = 0
        self._patiently(lambda: self._create(private))
        self._patiently(self._refuse_other_rows)

    def _create(self, private: bool) -> None:
        from huggingface_hub.errors import HFValidationError

        try:
            self._api.create_repo(
                self._repo, repo_type="dataset", private=private or None, exist_ok=True
            )
        except HFValidationError as error:
            raise ConfigError(f"push: {self._repo!r} is not USER/SET: {error}") from None
        if private and not self._api.repo_info(self._repo, repo_type="dataset").private:
            raise ConfigError(
                f"push --private: {self._repo} exists already and is public: make it private on "
                "the hub, or choose another name"
            )

    def _refuse_other_rows(self) -> None:
        """Refuse a repository that has shards of another job or set."""
        name = self._folder.identity_file
        there = {file.path for file in self._remote_files(self._head())}
        if not any(path.startswith("data/") for path in there):
            return
        lines = [f"it has no {name}"]
        if name in there:
            with tempfile.TemporaryDirectory(prefix="batchgen-push-") as folder:
                path = self._api.hf_hub_download(
                    self._repo, name, repo_type="dataset", local_dir=folder
                )
                lines = self._folder.differences(Path(path).read_bytes())
        if lines:
            raise ConfigError(
                f"push: {self._repo} holds other rows than {self._folder.user_path}: choose "
                "another name\n  " + "\n  ".join(lines)
            )

    @property
    def url(self) -> str:
        """The page of the data set."""
        return f"{self._api.endpoint}/datasets/{self._repo}"

    def push(self, *, complete: bool) -> None:
        """Push the files that the repository lacks. The card of an incomplete job says that it is
        incomplete; after the push of a complete one the repository has exactly its rows.

        Raises:
            JobError: a file is damaged or missing, or the hub refuses, or fails too often. What
                was pushed stays.
        """
        while self._patiently(lambda: self._push_some(complete)):
            pass

    def push_while_running(self) -> None:
        """Push shards as the job publishes them, until it is complete.

        Raises:
            JobError: the job has stopped before that, or the hub refuses. What was there is pushed.
        """
        while (status := self._folder.status) == "running":
            self.push(complete=False)
            self._sleep(_LOOK_SECONDS)
        self.push(complete=status == "complete")
        if status != "complete":
            raise JobError(
                f"the job in {self._folder.user_path} is not complete ({status}). What it has "
                "was pushed: run its command again, and then this one"
            )

    def _push_some(self, complete: bool) -> bool:
        """Push one commit of missing files; return whether there were any."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        head = self._head()
        there = {file.path: file for file in self._remote_files(head)}
        batch = self._missing(self._folder.files(complete=complete), there)
        for file in batch:
            file.check()
        names = [file.name for file in batch]
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(file.name, file.source) for file in batch
        ]
        if not batch and complete:
            complete_names = {file.name for file in self._folder.files(complete=True)}
            names = [
                name for name in there if self._folder.has_rows(name) and name not in complete_names
            ]
            operations = [CommitOperationDelete(name) for name in names]
        if not operations:
            return False
        shards = sum(name.endswith(".parquet") for name in names)
        self._api.create_commit(
            self._repo,
            operations,
            commit_message=f"batchgen: {shards} shards" if shards else f"batchgen: {names[0]}",
            repo_type="dataset",
            parent_commit=head,
        )
        self.commits += 1
        self.pushed += len(names)
        self._say(f"{self._repo}: {self.pushed:,} files in {self.commits:,} commits")
        return True

    def _missing(
        self, files: Iterator[LocalFile], there: dict[str, RepoFile]
    ) -> Sequence[LocalFile]:
        """The first files that are not there, with at most SHARDS_IN_COMMIT shards."""
        missing: list[LocalFile] = []
        shards = 0
        for file in files:
            if self._is_there(file, there.get(file.name)):
                continue
            shards += file.name.endswith(".parquet")
            if shards > SHARDS_IN_COMMIT:
                break
            missing.append(file)
        return missing

    def _is_there(self, file: LocalFile, remote: RepoFile | None) -> bool:
        """Whether the repository has a file with this size and digest."""
        if remote is None or remote.size != file.size:
            return False
        if remote.lfs is None:
            return remote.blob_id == file.git_blob()
        return remote.lfs.sha256 == self._sha256(file)

    def _sha256(self, file: LocalFile) -> str:
        """The digest of a file, which is computed once as long as the file stays."""
        stat = file.source.stat()
        stamp, digest = self._known.get(file.source, ((0, 0), ""))
        if stamp != (stat.st_mtime_ns, stat.st_size):
            digest = file.sha256()
            self._known[file.source] = (stat.st_mtime_ns, stat.st_size), digest
        return digest

    def _head(self) -> str:
        sha = self._api.repo_info(self._repo, repo_type="dataset").sha
        if sha is None:
            raise JobError(f"push: the hub does not say what the last commit of {self._repo} is")
        return sha

    def _remote_files(self, head: str) -> list[RepoFile]:
        from huggingface_hub.hf_api import RepoFile

        entries = self._api.list_repo_tree(
            self._repo, recursive=True, revision=head, repo_type="dataset"
        )
        return [item for item in entries if isinstance(item, RepoFile)]

    def _patiently(self, work: Callable[[], _T]) -> _T:
        """Call a function that may be repeated, until it succeeds or has failed too often."""
        wait = 1.0
        for left in reversed(range(_TRIES)):
            try:
                return work()
            except _hub_errors() as error:
                status, after = _status(error)
                if status is not None and status not in (*_TRANSIENT, _CONFLICT):
                    raise JobError(f"push: the hub refuses: {_error_text(error)}") from None
                if not left:
                    raise JobError(
                        f"push: the hub fails again and again ({_error_text(error)}): what was "
                        "pushed stays, and the same command resumes"
                    ) from None
                if status != _CONFLICT:
                    self._sleep(min(after or wait, _MOST_WAIT))
                    wait = min(2 * wait, _MOST_WAIT)
        raise AssertionError


def _hub_errors() -> tuple[type[Exception], ...]:
    """The errors that calls of the hub raise if the hub or the network fails; failed uploads raise
    a RuntimeError with the cause."""
    from huggingface_hub import errors

    network: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    return network, RuntimeError, errors.LocalEntryNotFoundError


def _status(error: Exception) -> tuple[int | None, float | None]:
    """The status of the answer that an error is about, and for how long it asks to wait, in
    seconds; None without one."""
    from huggingface_hub.errors import HfHubHTTPError

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    if cause is None or cause.response is None:
        return None, None
    after = cause.response.headers.get("Retry-After", "")
    return cause.response.status_code, float(after) if after.isdigit() else None


def _error_text(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    return " ".join(f"{type(cause).__name__}: {cause}".split())[:500]
