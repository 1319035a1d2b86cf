"""What is equal over runs and machines: fingerprints of files, and the seed of a sample."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

CHUNK = 1 << 20
HUGE = 256 << 20
NUM_SAMPLES = 64


def derive_seed(job_seed: int, row_id: str, sample_index: int) -> int:
    """The seed of one sample of one row, in [0, 2**64): different for each, equal everywhere.

    It depends on the row's id and not on its position, so that a row keeps its tokens when others
    are added or dropped (with `dataset.id_column`).
    """
    digest = blake2b(digest_size=8, person=b"batchgen.seed")
    digest.update((job_seed % 2**64).to_bytes(8, "little"))
    digest.update(sample_index.to_bytes(8, "little"))
    digest.update(row_id.encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "little")


def fingerprint_files(paths: Iterable[Path | str]) -> str:
    """32 hex digits over names, sizes and content of the files, wherever they lie.

    A file counts with its name; a folder with all files below it, named relative to it, without
    hidden ones. The order of `paths` and modification times play no part. Of a file larger than
    256 MiB only 64 MiB are read: its size and 64 pieces of 1 MiB at fixed, evenly spaced places,
    the first and the last among them. So a change of a few bytes inside a huge file can go
    unseen; another checkpoint or another export of a data set cannot.

    Raises:
        OSError: a path does not exist or cannot be read.
    """
    entries = []
    for path in map(Path, paths):
        if path.is_dir():
            names = ((file.relative_to(path), file) for file in path.rglob("*") if file.is_file())
            files = [(n.as_posix(), f) for n, f in names if not _hidden(n)]
        else:
            files = [(path.name, path)]
        entries += [(name, _file_digest(file)) for name, file in files]
    return fingerprint_text(*(part for entry in sorted(entries) for part in entry))


def fingerprint_text(*parts: str) -> str:
    """32 hex digits over the strings; where one ends and the next begins counts too."""
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _hidden(name: Path) -> bool:
    return any(part.startswith(".") for part in name.parts)


def _file_digest(path: Path) -> str:
    size = path.stat().st_size
    digest = blake2b(size.to_bytes(8, "little"), digest_size=16)
    with path.open("rb") as file:
        if size > HUGE:
            for i in range(NUM_SAMPLES):
                file.seek((size - CHUNK) * i // (NUM_SAMPLES - 1))
                digest.update(file.read(CHUNK))
        else:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()
