"""Detects the language of a text with langdetect, for instructions about languages."""

from __future__ import annotations

from collections.abc import Callable

from batchgen.util.errors import ConfigError


def language_of(text: str) -> str | None:
    """Return the likeliest language of a text: a two-letter code, or `zh-cn` or `zh-tw` for
    Chinese. None if the text has no features to recognise a language by. Equal texts give equal
    results.

    Raises:
        ConfigError: the package langdetect is not installed.
    """
    detect = _detector()
    from langdetect import LangDetectException

    try:
        return detect(text)
    except LangDetectException:
        return None


def _detector() -> Callable[[str], str]:
    try:
        from langdetect import DetectorFactory, detect
    except ImportError:
        raise ConfigError(
            "instructions on languages need the package langdetect: pip install 'batchgen[evals]'"
        ) from None
    DetectorFactory.seed = 0
    language_of: Callable[[str], str] = detect
    return language_of
