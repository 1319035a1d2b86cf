"""Reads paths and URLs that users give; all paths from configurations and arguments go through
here."""

from __future__ import annotations

import os
from pathlib import Path

from batchgen.util.errors import ConfigError


def is_url(typed: str | os.PathLike[str]) -> bool:
    """Whether what a user gives for a job's folder is in an object store."""
    return isinstance(typed, str) and "://" in typed


def user_folder(typed: str | os.PathLike[str], key: str) -> str:
    """The folder of a job that a user names: a path (see `short_user_path`), or a URL of a known
    store."""
    if not is_url(typed):
        return str(short_user_path(typed, key))
    scheme, _, rest = os.fspath(typed).partition("://")
    rest = rest.strip("/")
    if scheme != "s3" or not rest:
        raise ConfigError(
            f"{key}={typed}: give a folder, or s3://BUCKET/NAME for an S3 object store (for one "
            "that is not Amazon's, set its endpoint in AWS_ENDPOINT_URL)"
        )
    return f"{scheme}://{rest}"


def folder_here(typed: str, what: str) -> str:
    """A job's folder for `what` works on folders of this machine alone. Raises ConfigError for an
    object store."""
    if is_url(typed):
        raise ConfigError(
            f"{what} works on a folder of this machine, and {typed} is in an object store: copy it "
            f"first (aws s3 sync {typed} FOLDER), and name that folder"
        )
    return typed


def user_path(typed: str | os.PathLike[str], key: str) -> Path:
    """The absolute path that a user means for a key or argument.

    A leading `~` or `~name` is a home folder, as in a shell, and a relative path begins at the
    working directory. Trailing slashes, `.` and `..` are taken out; links and globs stay as they
    are written.

    Raises:
        ConfigError: the path is empty, names an unknown user, or holds a null character.
    """
    text = os.fspath(typed)
    if not text:
        raise ConfigError(f"{key} is empty: give a path")
    if "\0" in text:
        raise ConfigError(f"{key}: {text!r} is not a valid path: it contains a null character")
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        user = expanded.split("/", 1)[0]
        raise ConfigError(
            f"{key}: {text}: there is no user {user[1:]!r} whose home folder {user} could be: "
            f"write ./{text} for a file of that name"
        )
    return Path(os.path.abspath(expanded))


def short_user_path(typed: str | os.PathLike[str], key: str) -> Path:
    """`user_path`, but a relative path stays relative, so that configurations and messages show it
    as it was typed. No job changes the working directory."""
    path = user_path(typed, key)
    short = os.path.normpath(typed)
    # pyarrow reads a leading ~ (of ./~/x) as the home folder, and a colon as the mark of a URL.
    odd = short.startswith("~") or ":" in short
    return path if odd or os.path.isabs(short) else Path(short)


def user_cache() -> Path:
    """batchgen's folder in the cache of this user, $XDG_CACHE_HOME or ~/.cache."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = folder if folder.is_absolute() else Path(os.path.expanduser("~/.cache"))
    return base / "batchgen"
