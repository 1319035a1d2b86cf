"""Seeds and fingerprints are the same on every machine and differ where they must."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen import fingerprint
from batchgen.fingerprint import derive_seed, fingerprint_files, fingerprint_text


@pytest.mark.parametrize(
    ("job_seed", "row_id", "sample", "seed"),
    [
        (0, "0", 0, 615862751024582341),
        (0, "0", 1, 6734973053126156518),
        (1, "0", 0, 9752048935730788955),
        (2**64 - 1, "gsm8k-ü-7", 63, 7652601264500500722),
    ],
)
def test_seeds_never_change(job_seed: int, row_id: str, sample: int, seed: int) -> None:
    assert derive_seed(job_seed, row_id, sample) == seed


KEYS = st.tuples(st.integers(0, 2**64 - 1), st.text(), st.integers(0, 2**40))


@given(st.sets(KEYS, max_size=50))
def test_seeds_are_distinct_64_bit_numbers(keys: set[tuple[int, str, int]]) -> None:
    seeds = [derive_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_a_negative_seed_is_its_64_bits() -> None:
    assert derive_seed(-1, "a", 0) == derive_seed(2**64 - 1, "a", 0)


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_text_fingerprints_keep_parts_apart(a: list[str], b: list[str]) -> None:
    assert (fingerprint_text(*a) == fingerprint_text(*b)) == (a == b)


def folder(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_fingerprint_is_of_names_and_content_wherever_they_lie(tmp_path: Path) -> None:
    files = {"a.bin": b"1", "sub/b.bin": b"2"}
    one, two = folder(tmp_path / "one", files), folder(tmp_path / "two", files)
    os.utime(two / "a.bin", (0, 0))
    (two / ".cache").mkdir()
    (two / ".cache" / "lock").write_bytes(b"x")
    assert fingerprint_files([one]) == fingerprint_files([two])
    assert fingerprint_files([one / "a.bin", one]) == fingerprint_files([one, one / "a.bin"])
    # The known answer: fingerprints in manifests stay valid.
    assert fingerprint_files([one]) == "bcb365febe60c371b66b77cb310c1645"


@pytest.mark.parametrize(
    "files",
    [
        {"a.bin": b"1", "sub/b.bin": b"3"},
        {"a.bin": b"1", "sub/c.bin": b"2"},
        {"a.bin": b"2", "sub/b.bin": b"1"},
        {"a.bin": b"1"},
        {"a.bin": b"1", "sub/b.bin": b"2", "c": b""},
    ],
)
def test_any_difference_shows(tmp_path: Path, files: dict[str, bytes]) -> None:
    base = folder(tmp_path / "base", {"a.bin": b"1", "sub/b.bin": b"2"})
    other = folder(tmp_path / "other", files)
    assert fingerprint_files([base]) != fingerprint_files([other])


def test_huge_files_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "HUGE", 1000)
    monkeypatch.setattr(fingerprint, "CHUNK", 10)
    content = bytearray(range(250)) * 8
    file = folder(tmp_path, {"w": bytes(content)}) / "w"
    before = fingerprint_files([file])
    for at, seen in ((0, True), (len(content) - 1, True), (15, False)):
        changed = bytearray(content)
        changed[at] ^= 1
        file.write_bytes(changed)
        assert (fingerprint_files([file]) != before) == seen
    file.write_bytes(content + b"x")
    assert fingerprint_files([file]) != before


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fingerprint_files([tmp_path / "none"])
