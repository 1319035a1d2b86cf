"""Pushes a folder to a data set repository of the Hugging Face Hub, commit by commit, for `batchgen
push`. No file is uploaded twice."""

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
_MOST_WAIT = 60.0  # seconds between two attempts
_LOOK_SECONDS = 30.0  # seconds between two looks at a running job
_CONFLICT = 412  # the HTTP status if another commit was made meanwhile
_TRANSIENT = (408, 429, 500, 502, 503, 504)  # HTTP statuses after which a retry can succeed


class FolderPush:
    """The push of one folder to one repository.

    A commit names its parent, so two processes that push at once cannot overwrite each other: the
    later one reads the repository again and continues. The repository is also read again after each
    failure, so a commit whose response was lost is not repeated.

    Attributes:
        pushed: the number of files pushed or deleted.
        commits: the number of commits made.
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
        """Find the repository, or create it.

        Args:
            repo: the name of the repository, USER/SET.
            private: create the repository as a private one.
            say: prints a line of progress.

        Raises:
            ConfigError: the user is not logged in, the name is invalid, or the repository holds
                other rows.
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
        # File → ((time of change, size), digest).
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
        """Raise ConfigError if the repository has shards of another job or set."""
        name = self._folder.identity_file
        remote_names = {file.path for file in self._remote_files(self._head())}
        if not any(path.startswith("data/") for path in remote_names):
            return
        lines = [f"it has no {name}"]
        if name in remote_names:
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
        """Push the files that the repository lacks. After the push of a complete job, files of rows
        that the job does not have are deleted from the repository.

        Args:
            complete: whether the job is complete. If not, its card says so.

        Raises:
            JobError: a file is damaged or missing, or the hub refuses or fails too often. What was
                pushed stays.
        """
        while self._patiently(lambda: self._push_some(complete)):
            pass

    def push_while_running(self) -> None:
        """Push shards as the job writes them, until it is complete.

        Raises:
            JobError: the job stopped before it was complete, after its rows were pushed; or the hub
                refuses.
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
        """Make one commit: of missing files or, if there are none, of deletions. Returns whether
        there was anything to commit."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        head = self._head()
        remote_files = {file.path: file for file in self._remote_files(head)}
        batch = self._missing(self._folder.files(complete=complete), remote_files)
        for file in batch:
            file.check()
        names = [file.name for file in batch]
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(file.name, file.source) for file in batch
        ]
        if not batch and complete:
            complete_names = {file.name for file in self._folder.files(complete=True)}
            names = [
                name
                for name in remote_files
                if self._folder.has_rows(name) and name not in complete_names
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
        """Return the first files that the repository lacks, with at most SHARDS_IN_COMMIT shards.

        Args:
            there: path → file, of the repository.
        """
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
        """Whether the repository's file has the size and digest of a local file."""
        if remote is None or remote.size != file.size:
            return False
        if remote.lfs is None:
            return remote.blob_id == file.git_blob()
        return remote.lfs.sha256 == self._sha256(file)

    def _sha256(self, file: LocalFile) -> str:
        """Return the digest of a file, cached until the file changes."""
        stat = file.source.stat()
        stamp, digest = self._known.get(file.source, ((0, 0), ""))
        if stamp != (stat.st_mtime_ns, stat.st_size):
            digest = file.sha256()
            self._known[file.source] = (stat.st_mtime_ns, stat.st_size), digest
        return digest

    def _head(self) -> str:
        """Return the hash of the repository's last commit."""
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
        """Call a function that is safe to repeat, until it succeeds.

        Raises:
            JobError: the hub refuses, or _TRIES calls have failed.
        """
        wait = 1.0
        for tries_left in reversed(range(_TRIES)):
            try:
                return work()
            except _hub_errors() as error:
                status, retry_after = _status(error)
                if status is not None and status not in (*_TRANSIENT, _CONFLICT):
                    raise JobError(f"push: the hub refuses: {_error_text(error)}") from None
                if not tries_left:
                    raise JobError(
                        f"push: the hub fails again and again ({_error_text(error)}): what was "
                        "pushed stays, and the same command resumes"
                    ) from None
                if status != _CONFLICT:
                    self._sleep(min(retry_after or wait, _MOST_WAIT))
                    wait = min(2 * wait, _MOST_WAIT)
        raise AssertionError


def _hub_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that calls raise if the hub or the network fails. A failed upload
    raises a RuntimeError with the cause."""
    from huggingface_hub import errors

    network: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    return network, RuntimeError, errors.LocalEntryNotFoundError


def _status(error: Exception) -> tuple[int | None, float | None]:
    """Return the HTTP status of an error and the seconds to wait that the response asks for; None
    for either without one."""
    from huggingface_hub.errors import HfHubHTTPError

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    if cause is None or cause.response is None:
        return None, None
    retry_after = cause.response.headers.get("Retry-After", "")
    return cause.response.status_code, float(retry_after) if retry_after.isdigit() else None


def _error_text(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    return " ".join(f"{type(cause).__name__}: {cause}".split())[:500]
