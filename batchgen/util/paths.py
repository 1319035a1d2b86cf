"""Reads paths and URLs that users write. All paths from configurations and arguments are read
here."""

from __future__ import annotations

import os
from pathlib import Path

from batchgen.util.errors import ConfigError


def is_url(typed: str | os.PathLike[str]) -> bool:
    """Whether a job's folder, as the user wrote it, is in an object store."""
    return isinstance(typed, str) and "://" in typed


def user_folder(typed: str | os.PathLike[str], key: str) -> str:
    """Return a job's folder that a user names: a path as `short_user_path` returns it, or a URL of
    an object store.

    Args:
        key: the key or argument, for messages.

    Raises:
        ConfigError: the path is invalid, or the URL is not one of S3.
    """
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
    """Return the folder if it is on this machine. Raises ConfigError for an object store.

    Args:
        what: the command that needs a local folder, for the message.
    """
    if is_url(typed):
        raise ConfigError(
            f"{what} works on a folder of this machine, and {typed} is in an object store: copy it "
            f"first (aws s3 sync {typed} FOLDER), and name that folder"
        )
    return typed


def user_path(typed: str | os.PathLike[str], key: str) -> Path:
    """Return the absolute path that a user means.

    A leading `~` or `~name` is a home folder, as in a shell. A relative path is relative to the
    working directory. Trailing slashes, `.` and `..` are resolved; links and globs are kept.

    Args:
        key: the key or argument, for messages.

    Raises:
        ConfigError: the path is empty, names an unknown user, or contains a null character.
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
    """Return a path like `user_path`, but keep a relative path relative, so that configurations and
    messages show it as it was typed. This is safe because no job changes the working directory."""
    path = user_path(typed, key)
    short = os.path.normpath(typed)
    # pyarrow takes a leading ~ (left of ./~/x) for the home folder, and a colon for a URL.
    is_ambiguous = short.startswith("~") or ":" in short
    return path if is_ambiguous or os.path.isabs(short) else Path(short)


def user_cache() -> Path:
    """Return batchgen's folder in the user's cache, in $XDG_CACHE_HOME or ~/.cache."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = folder if folder.is_absolute() else Path(os.path.expanduser("~/.cache"))
    return base / "batchgen"
