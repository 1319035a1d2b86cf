"""Seeds and fingerprints are the same on every machine and differ where they must."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.engine.request_params import derive_seed
from batchgen.util import fingerprint
from batchgen.util.digest_cache import DigestCache
from batchgen.util.fingerprint import fingerprint_files, fingerprint_text


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


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a kilobyte are huge."""
    monkeypatch.setattr(fingerprint, "HUGE", 1000)
    monkeypatch.setattr(fingerprint, "PART", 300)
    monkeypatch.setattr(fingerprint, "CHUNK", 100)
    monkeypatch.setattr(fingerprint, "CACHED", 1000)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's own digests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "batchgen" / "digests"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Which parts (from, to) of files have been read."""
    parts: list[tuple[int, int]] = []
    real = fingerprint._part_digest

    def spy(file: Path, start: int, stop: int, size: int) -> str:
        parts.append((start, stop))
        return real(file, start, stop, size)

    monkeypatch.setattr(fingerprint, "_part_digest", spy)
    return parts


def _settle(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a minute pass since the file was written."""
    now = file.stat().st_ctime_ns
    monkeypatch.setattr(time, "time_ns", lambda: now + 60 * 10**9)


SIZES = st.sampled_from([1, 99, 999, 1000, 1001, 1200, 1201, 2500])


@pytest.mark.usefixtures("small", "cache")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(size=SIZES, data=st.data())
def test_one_byte_anywhere_shows(tmp_path: Path, size: int, data: st.DataObject) -> None:
    content = bytearray(i % 251 for i in range(size))
    file = tmp_path / "w"
    file.write_bytes(content)
    before = fingerprint_files([file])
    at = data.draw(st.integers(0, size - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)  # at once: the file's times may be the same as before
    assert fingerprint_files([file]) != before
    (tmp_path / "sub").mkdir(exist_ok=True)
    (tmp_path / "sub" / "w").write_bytes(content)
    assert fingerprint_files([tmp_path / "sub" / "w"]) == fingerprint_files([file])


@pytest.mark.usefixtures("small", "cache")
def test_the_order_and_the_number_of_parts_show(tmp_path: Path) -> None:
    contents = [b"a" * 600 + b"b" * 600, b"b" * 600 + b"a" * 600, b"a" * 1200, b"a" * 1500]
    found = {fingerprint_files([folder(tmp_path, {"w": content}) / "w"]) for content in contents}
    assert len(found) == len(contents)


@pytest.mark.usefixtures("small")
def test_a_large_file_is_read_once_until_it_changes(
    tmp_path: Path, cache: Path, reads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder(tmp_path, {"w": bytes(1300), "config.json": b"{}"}) / "w"
    _settle(file, monkeypatch)
    first = fingerprint_files([file, tmp_path / "config.json"])
    assert sorted(reads) == [(0, 2), (0, 300), (300, 600), (600, 900), (900, 1200), (1200, 1300)]
    assert len(list(cache.iterdir())) == 1
    reads.clear()
    (tmp_path / "link").symlink_to(file)
    assert fingerprint_files([file, tmp_path / "config.json"]) == first
    assert fingerprint_files([tmp_path / "link"]) == fingerprint_text(
        "link", DigestCache().get(file, file.stat()) or ""
    )
    assert reads == [(0, 2)]
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(bytes(1299) + b"x")
    os.utime(file, ns=times)  # an edit that hides itself
    assert fingerprint_files([file, tmp_path / "config.json"]) != first
    assert len(reads) == 1 + 1 + 5


@pytest.mark.usefixtures("small")
def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path, cache: Path) -> None:
    fingerprint_files([folder(tmp_path, {"w": bytes(1300)}) / "w"])
    assert not cache.exists()


DAMAGE: list[Callable[[bytes], bytes]] = [
    lambda entry: b"",
    lambda entry: entry[:-1],
    lambda entry: entry[::-1],
    lambda entry: b"0" + entry[1:],
    lambda entry: b"\xff\x00" * 40,
    lambda entry: entry.split()[0],
]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_ignored(
    tmp_path: Path,
    cache: Path,
    reads: list[tuple[int, int]],
    damage: Callable[[bytes], bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = folder(tmp_path, {"w": b"content" * 200}) / "w"
    _settle(file, monkeypatch)
    first = fingerprint_files([file])
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    reads.clear()
    assert fingerprint_files([file]) == first
    assert len(reads) == 5 and entry.read_bytes() == whole


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["file", "folder in the way", "no home"])
def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, cache: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder(tmp_path, {"w": bytes(1300)}) / "w"
    _settle(file, monkeypatch)
    first = fingerprint_files([file])
    (entry,) = cache.iterdir()
    entry.unlink()
    if kind == "file":
        cache.rmdir()
        cache.write_bytes(b"")
    elif kind == "folder in the way":
        entry.mkdir()
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "/dev/null")
    assert fingerprint_files([file]) == first
    assert not entry.is_file() and not list(cache.parent.rglob("*.tmp"))


@pytest.mark.thorough
@pytest.mark.usefixtures("cache")
def test_fingerprints_of_huge_files_stay_valid(tmp_path: Path) -> None:
    """The known answer, of a file with a hole: manifests hold fingerprints."""
    with (tmp_path / "w").open("wb") as file:
        file.truncate((256 << 20) + 1)
    assert fingerprint_files([tmp_path / "w"]) == "13ddc17648e668c34e1b21d7619afe00"


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fingerprint_files([tmp_path / "none"])
