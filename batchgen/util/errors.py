"""The errors whose messages are meant for the user. The command prints them without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """A mistake in a job's configuration, or in something that the configuration names, such as the
    data set.

    The message names the key, says what is wrong, and says what to do.
    """


class JobError(Exception):
    """The job cannot continue, for instance because the disk is full or output is damaged. The
    message says why and what to do.

    Finished rows are safe, and running the same command again resumes the job.
    """


class FolderLost(JobError):
    """The output folder of a running job was deleted or replaced, so rows may be lost."""


class OpenedAnew(JobError):
    """Another process started the job anew while this one was joining it. Joining again
    succeeds."""


@contextmanager
def mistakes_in(group: str) -> Iterator[None]:
    """Turn a ValueError of lower layers into a ConfigError that begins with the name of a
    configuration group."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{group}: {error}") from error
