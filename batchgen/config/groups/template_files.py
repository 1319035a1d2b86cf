"""Reads the templates of prompts, which a configuration gives as text or as files, for
`prompt_config.py`."""

from __future__ import annotations

from batchgen.util.errors import ConfigError
from batchgen.util.paths import user_path

# The most characters that a path can have on Linux.
_LONGEST_NAME = 4096


def template_text(key: str, text: str | None, file: str | None) -> str | None:
    """The template of a key such as `prompt.user`, given as text or by the name of a file (the key
    with `_file`); None if neither is set.

    The byte order mark of a file and the newline at its end are not part of the template.

    Raises:
        ConfigError: both are set, the file cannot be read as UTF-8, or the text is the name of a
            file.
    """
    if file is None:
        if text is not None:
            _refuse_file_name(key, text)
        return text
    if text is not None:
        raise ConfigError(f"{key} and {key}_file are both set: choose one ({key}=null drops it)")
    path = user_path(file, f"{key}_file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}_file: {file} cannot be read: {error.strerror}") from None
    try:
        decoded = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{key}_file: {file}, line {line}: not UTF-8: {error.reason} at byte {error.start} of "
            "the file: save it as UTF-8"
        ) from None
    return decoded.replace("\r\n", "\n").removesuffix("\n")


def _refuse_file_name(key: str, text: str) -> None:
    """Raise ConfigError if a text is the name of a file, whose content is probably meant."""
    if "\n" in text or "{" in text or "\0" in text or not 0 < len(text) < _LONGEST_NAME:
        return
    try:
        is_file = user_path(text, key).is_file()
    except (ConfigError, OSError):  # no name that a file can have
        return
    if is_file:
        raise ConfigError(
            f"{key} is the text {text!r}, and a file has that name: write {key}_file={text} for "
            "the contents of the file"
        )
