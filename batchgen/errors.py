"""What a job tells its user instead of a traceback."""


class ConfigError(ValueError):
    """A user's mistake, found before any row is run.

    The message is one line that names the key, says what is wrong with it and what to do.
    """


class JobError(Exception):
    """The job cannot go on (disk full, damaged output): the message says why and what to do.

    What was finished before it is safe; running the same command resumes.
    """
