"""Templates of prompts, as text and in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.config.groups.prompt_config import ChatPromptConfig, TextPromptConfig
from batchgen.util.errors import ConfigError


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Path("home").mkdir()


@pytest.mark.parametrize(
    ("content", "template"),
    [
        (b"Say {{ q }}", "Say {{ q }}"),
        (b"Say {{ q }}\n", "Say {{ q }}"),
        (b"\n Say\n\n", "\n Say\n"),
        (b"\xef\xbb\xbfa\r\nb\r\n", "a\nb"),
        ("漢字\n".encode(), "漢字"),
        (b"", ""),
    ],
)
def test_a_file_is_its_content(content: bytes, template: str) -> None:
    Path("home/t.jinja").write_bytes(content)
    chat = ChatPromptConfig(user_file="~/t.jinja", system_file="home/../home/t.jinja")
    assert chat == ChatPromptConfig(user=template, system=template)
    assert TextPromptConfig(text_file="home/t.jinja") == TextPromptConfig(text=template)


def test_what_is_taken_without_a_template() -> None:
    assert ChatPromptConfig().user == "{{ question }}"
    assert ChatPromptConfig(messages_column="m").user is None
    assert TextPromptConfig().text == "{{ prompt }}"


def test_a_file_that_is_not_utf8() -> None:
    Path("t.txt").write_bytes(b"a\nb\xe4\n")
    with pytest.raises(ConfigError) as raised:
        TextPromptConfig(text_file="t.txt")
    assert str(raised.value) == (
        "prompt.text_file: t.txt, line 2: not UTF-8: invalid continuation byte at byte 3 of the "
        "file: save it as UTF-8"
    )


def test_the_name_of_a_file_is_no_template() -> None:
    Path("t.jinja").write_text("{{ q }}")
    with pytest.raises(ConfigError, match=r"has that name: write prompt.system_file=t.jinja"):
        ChatPromptConfig(user="{{ q }}", system="t.jinja")
    for text in ("home", "u.jinja", "t.jinja\n", "~nobody-here/x", "x" * 300, "a\0b"):
        assert ChatPromptConfig(user=text).user == text
