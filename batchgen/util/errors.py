"""Errors whose messages are for the user of a job, who sees them without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """A mistake in a job's configuration or in what it names, such as its data set.

    The message is one line that names the key, says what is wrong with it and what to do.
    """


class JobError(Exception):
    """The job cannot go on (disk full, damaged output): the message says why and what to do.

    What was finished before it is safe; running the same command resumes.
    """


class FolderLost(JobError):
    """The output folder of a running job was deleted or replaced: no row is known to be safe."""


class OpenedAnew(JobError):
    """Another process has opened the job anew while this one joined it: joining again mends it."""


@contextmanager
def mistakes_in(group: str) -> Iterator[None]:
    """Turn a ValueError of the lower layers into a ConfigError that names the group it is about."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{group}: {error}") from error
