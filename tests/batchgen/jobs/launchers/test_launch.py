"""Which launcher runs a job, and what is refused before any of them looks at a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from batchgen.__main__ import run_command
from batchgen.config.compose.compose_config import compose
from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.launcher_config import Launched, Launcher, job_launcher
from batchgen.jobs.launchers import launch as module
from batchgen.jobs.launchers import launch_progress
from batchgen.jobs.launchers.launch import check_launcher, launch, launcher_text
from batchgen.jobs.launchers.launch_progress import LaunchProgress
from batchgen.jobs.launchers.launched import LaunchedFolder, make_logs, remove_logs
from batchgen.storage.folder.open_folder import open_job_reader
from batchgen.storage.folder.refused_folder import refuse_foreign_files
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.util.errors import ConfigError
from tests.support.jobs.fake_job import FakeJob


@pytest.mark.parametrize("job", [{"launcher": "ray"}, {"launcher": "local"}])
def test_rows_from_standard_input_are_refused(job: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"cannot read rows from standard input: .*dataset\.path"):
        launch(compose({**job, "dataset.path": "-"}))


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'batchgen\[ray\]'"):
        launch(compose({"launcher": "ray"}))


def test_the_launcher_in_words() -> None:
    assert launcher_text(compose({})) is None
    assert launcher_text(compose({"launcher.workers": 1})) == "local: 1 worker"
    ray = {"launcher": "ray", "launcher.address": "auto"}
    assert launcher_text(compose(ray)) == "ray: a worker on each GPU, address auto"


def test_keys_that_say_which_launcher_is_meant() -> None:
    def name(job: dict[str, object]) -> str | None:
        launcher = job_launcher(compose(job))
        return None if launcher is None else launcher.name

    assert name({"launcher.workers": 2}) == "local"
    assert name({"launcher.placement": "pack"}) == "ray"


class OwnLauncher(Launcher):
    """A launcher of a user's."""

    name = "own"

    def __init__(self, number: int = 1) -> None:
        self.number = number

    def described(self) -> str:
        return f"own: {self.number}"

    def launch(self, config: JobConfig) -> Launched:
        return Launched(0, None, f"{self.number} here")


def test_a_launcher_of_the_users_own() -> None:
    own = {"launcher": {"_target_": f"{__name__}.OwnLauncher", "number": 3}}
    assert launcher_text(compose(own)) == "own: 3"
    assert launch(compose(own)).message == "3 here"
    with pytest.raises(ConfigError, match=r"launcher\.number must be an integer, got 'x'"):
        compose({"launcher": {**own["launcher"], "number": "x"}})
    with pytest.raises(ConfigError, match=r"launcher\.numbers is not a key: choose among number"):
        compose({"launcher": {**own["launcher"], "numbers": 3}})
    with pytest.raises(ConfigError, match=r"\.Path is not a launcher"):
        compose({"launcher": {"_target_": f"{__name__}.Path"}})


def test_the_launcher_that_is_gone(tmp_path: Path) -> None:
    """Folders that it has started are read; a job that names it is told what to type."""
    for target in ("slurm", "batchgen.launchers.slurm.SlurmLauncher"):
        with pytest.raises(ConfigError, match="hydra/launcher=submitit_slurm"):
            compose({"launcher": {"_target_": target, "workers": 2}})
        FakeJob(str(tmp_path / "out"), rows=3, bad=False).run()
        file = tmp_path / "out/config.yaml"
        values = yaml.safe_load(file.read_text())
        values["launcher"] = {"_target_": target, "workers": 2}
        file.write_text(yaml.safe_dump(values))
        assert open_job_reader(str(tmp_path / "out")).config["launcher"] == {"_target_": None}
        steps = "post=[{Extract: {methods: [last_number]}}]"
        assert run_command(["grade", str(tmp_path / "out"), steps]) == 0


def test_the_folder_of_logs(tmp_path: Path) -> None:
    """It may be there before the job; a folder of other files is left alone."""
    out = tmp_path / "out"
    first, second = make_logs(out, "ray"), make_logs(out, "ray")
    refuse_foreign_files(FolderStorage(out))
    remove_logs(first)
    assert second.is_dir() and not first.exists()
    remove_logs(second)
    assert list(out.iterdir()) == []
    (out / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"not belong to a batchgen job \(thesis\.tex\)"):
        make_logs(out, "ray")
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    with pytest.raises(ConfigError, match="cannot be written"):
        make_logs(out / "thesis.tex", "ray")
    check_launcher(compose({"dataset.path": "-"}))


def test_the_line_of_a_launcher_counts_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = {"rows_total": 20, "generated_tokens": 6, "generate_s": 1.0}

    def beat(rows: int, errors: int, ended: str | None = None) -> dict[str, object]:
        totals = {"rows": rows, "error_rows": errors}
        return {"ended": ended, "attempt": attempt, "totals": totals}

    folder = LaunchedFolder(tmp_path)
    beats = [beat(5, 0), {"ended": None}, beat(4, 1, "complete")]
    monkeypatch.setattr(folder, "beats", lambda: beats)
    monkeypatch.setattr(launch_progress, "_LINE_SECONDS", 0.0)
    with LaunchProgress(folder, "title") as shown:
        shown.show(waiting=0)
        beats[0] = beat(5, 0)
        beats[2] = beat(4, 0)
        shown.show(waiting=0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "9/20 answers, 6 tok/s, 2 workers, 1 error"
    assert "error" not in lines[2]
