"""What stops a job that was set up rightly."""


class JobError(Exception):
    """The job cannot go on (disk full, damaged output): the message says why and what to do.

    What was finished before it is safe; running the same command resumes.
    """
