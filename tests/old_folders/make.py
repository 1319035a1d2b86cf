"""Makes `folders.tar.xz`, the folders that later versions must go on with.

    python tests/old_folders/make.py OLDER/.venv/bin/batchgen

runs the commands of commands.yaml with the batchgen of another checkout. The archive that is
committed was made at 3411184e, the first version whose folders later ones go on with, on a CPU,
with torch 2.13.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import yaml

HERE = Path(__file__).parent
ARCHIVE = HERE / "folders.tar.xz"


def commands() -> dict[str, list[str]]:
    """The arguments of each command by the name of what it makes, in their order."""
    found: dict[str, list[str]] = yaml.safe_load((HERE / "commands.yaml").read_text())
    return found


def main(batchgen: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for path in HERE.glob("*.jsonl"):
            shutil.copy(path, folder)
        for name, arguments in commands().items():
            print(f"== {name}", flush=True)
            ended = subprocess.run([batchgen, *arguments], cwd=folder, check=False)
            assert ended.returncode in (0, 3), name  # 3: some rows are error rows
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            for path in sorted(Path(folder).iterdir()):
                if path.suffix != ".jsonl":
                    archive.add(path, path.name)
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
