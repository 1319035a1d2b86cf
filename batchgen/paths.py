"""The one way in which a path that a user gives is read."""

from __future__ import annotations

import os
from pathlib import Path

from batchgen.errors import ConfigError


def user_path(given: str | os.PathLike[str], key: str) -> Path:
    """The absolute path that a user means.

    A leading `~` or `~name` is a home folder, as in a shell, and a relative path begins at the
    working directory. Trailing slashes, `.` and `..` are taken out; links stay as they are written.
    A glob stays a glob.

    Args:
        given: what the user gave.
        key: the key or argument that it was given for, for error messages.

    Raises:
        ConfigError: the path is empty, names an unknown user, or holds a null character.
    """
    text = os.fspath(given)
    if not text:
        raise ConfigError(f"{key} is empty: give a path")
    if "\0" in text:
        raise ConfigError(f"{key}: {text!r} is no path: it holds a null character")
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        user = expanded.split("/", 1)[0]
        raise ConfigError(
            f"{key}: {text}: there is no user {user[1:]!r} whose home folder {user} could be: "
            f"write ./{text} for a file of that name"
        )
    return Path(os.path.abspath(expanded))


def short_user_path(given: str | os.PathLike[str], key: str) -> Path:
    """`user_path`, but what was given as a relative path stays relative to the working directory.

    No job changes that directory. Configurations and messages then show the path as it was typed.

    Raises:
        ConfigError: as `user_path`.
    """
    path = user_path(given, key)
    short = os.path.normpath(given)
    # A path that begins with ~ (from ./~/x) would be expanded by the next one who reads it.
    return path if os.path.isabs(short) or short.startswith("~") else Path(short)
