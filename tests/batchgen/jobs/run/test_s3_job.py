"""Jobs on a server that speaks S3, whose requests fail, and the verbs that read them there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.fake_job import FakeJob

pytest.importorskip("obstore")
pytest.importorskip("moto.moto_server.werkzeug_app")

import boto3

from batchgen.__main__ import run_command
from batchgen.api.python.job_calls import run_job
from batchgen.config.compose.compose_config import compose
from batchgen.storage.leases import s3_objects
from batchgen.storage.leases.s3_objects import connect
from batchgen.storage.stores.open_storage import job_metrics
from batchgen.util.errors import ConfigError, JobError
from tests.batchgen.jobs.run.test_object_job import ObjectJob
from tests.support.jobs.racing_workers import winners
from tests.support.jobs.s3_server import BUCKET, FaultyS3, served
from tests.support.jobs.shared_jobs import in_threads

pytestmark = pytest.mark.thorough
URL = f"s3://{BUCKET}/some/job"
KEYS = "[lab]\naws_access_key_id = of-the-lab\naws_secret_access_key = secret\n"


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyS3]:
    with served() as found:
        yield found


def _data(url: str) -> dict[str, bytes]:
    store = connect(url)
    return {name: store.read(f"data/{name}") or b"" for name in sorted(store.names("data"))}


def _whole(tmp_path: Path, job: FakeJob) -> dict[str, bytes]:
    replace(job, out=str(tmp_path / "whole"), fail_at_step=-1).run()
    return {p.name: p.read_bytes() for p in sorted((tmp_path / "whole/data").iterdir())}


def test_a_job_on_s3_and_the_verbs(
    server: FaultyS3, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ObjectJob(URL, rows=30, samples=1, fail_at_step=4)
    with pytest.raises(RuntimeError):
        job.run()
    capsys.readouterr()
    assert run_command(["status", URL]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{URL}: failed, ") and " of 30 answers" in said
    assert "\n1 " in said and " failed " in said.splitlines()[2]  # the worker, as it ended
    assert run_command(["show", URL, "--rows", "1"]) == 0
    assert "id" in capsys.readouterr().out
    replace(job, fail_at_step=-1).run()
    assert _data(URL) == _whole(tmp_path, job)
    capsys.readouterr()
    rows = tmp_path / "rows.jsonl"
    assert run_command(["export", URL, "--out", str(rows)]) == 0
    assert len(rows.read_text().splitlines()) == 30
    metrics = job_metrics(URL)
    assert metrics is not None and metrics["rows"] == 30
    assert job_metrics(f"{URL}/none") is None
    for command in (["grade"], ["score"], ["report"], ["view"], ["validate"], ["show", "--follow"]):
        capsys.readouterr()
        assert run_command([command[0], URL, *command[1:]]) == 2
        said = capsys.readouterr().err
        assert f"batchgen {' '.join(command)} works on a folder of this machine" in said
        assert f"aws s3 sync {URL} FOLDER" in said
    assert run_command(["compare", URL, URL]) == 2
    assert run_command(["show", f"s3://{BUCKET}/none"]) == 2
    assert "has no manifest.json" in capsys.readouterr().err


def test_what_needs_a_folder_says_so_before_it_begins() -> None:
    values = {"output.dir": URL, "model": "nano_sdar"}
    with pytest.raises(ConfigError, match="launcher=local watches its workers in a folder"):
        compose(values, ["launcher=local"])
    with pytest.raises(ConfigError, match="run_job works on a folder of this machine"):
        run_job(values)


def test_a_bucket_that_is_not_there_and_keys_that_are_wrong(
    server: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="there is no such bucket"):
        ObjectJob("s3://another/job", rows=5).run()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    with pytest.raises(ConfigError, match="no credentials: set AWS_ACCESS_KEY_ID"):
        ObjectJob(URL, rows=5).run()


def test_a_put_that_succeeded_and_answered_an_error(server: FaultyS3) -> None:
    store = connect(f"s3://{BUCKET}/puts")
    server.rate, server.kinds = 1.0, ("error after",)
    answers: list[Any] = []
    store._sleep = lambda seconds: setattr(server, "rate", 0.0)
    try:
        answers.append(store.create("a", b"mine"))
        server.rate = 1.0
        answers.append(store.create("a", b"another's"))
    finally:
        server.rate, server.kinds = 0.0, FaultyS3.kinds
    assert answers == [True, False] and store.read("a") == b"mine"


@pytest.mark.slow
def test_workers_while_requests_fail(server: FaultyS3, tmp_path: Path) -> None:
    job = ObjectJob(f"s3://{BUCKET}/faulty", rows=60, report=True)
    server.rate = 0.03
    try:
        results = in_threads([job] * 3)
    finally:
        server.rate = 0.0
    assert [getattr(r, "exit_code", r) for r in results] == [3] * 3
    assert _data(job.out) == _whole(tmp_path, job)
    assert not {"journal", "leases", "differing"} & set(connect(job.out).names(""))


def test_a_store_that_heeds_no_condition(server: FaultyS3, tmp_path: Path) -> None:
    """Two workers that publish a shard would both be told that it is theirs."""
    url = f"s3://{BUCKET}/careless"
    store = connect(url)
    store.probe("probe")
    assert store.create("data/a", bytes(2)) and not store.create("data/a", bytes(3))
    server.heeds_conditions = False
    try:
        assert store.create("data/a", bytes(3))  # this is what must not be
        with pytest.raises(ConfigError, match="ignores If-None-Match"):
            ObjectJob(f"{url}/job", rows=4).run()
    finally:
        server.heeds_conditions = True
    assert store.sizes() == {"data/a": 3}


def test_a_large_object_is_made_by_one_request_once(
    server: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = connect(f"s3://{BUCKET}/large")
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(bytes(20 * 2**20))
    two.write_bytes(bytes(20 * 2**20 - 1) + b"1")
    before = server.requests
    assert store.create("data/a", one) and server.requests == before + 1
    assert not store.create("data/a", two) and store.is_same("data/a", one)
    store.overwrite("data/b", two.read_bytes())  # in parts
    assert store.is_same("data/b", two) and not store.is_same("data/b", one)
    assert store.sizes("data") == {"data/a": 20 * 2**20, "data/b": 20 * 2**20}
    assert store.names("") == ["data"] and store.exists("data") and not store.exists("dat")
    monkeypatch.setattr(s3_objects, "_LARGEST_PUT", 20 * 2**20 - 1)
    with pytest.raises(JobError, match=r"large/data/c: it has 0\.0 GiB.*output\.rows_per_shard"):
        store.create("data/c", one)


def test_many_workers_make_an_object_once(server: FaultyS3) -> None:
    assert len(winners(lambda name: connect(f"s3://{BUCKET}/race"))) == 50


def test_names_stay_what_they_are(server: FaultyS3) -> None:
    """As the AWS tools would write them; and what is no name is refused."""
    store = connect(f"s3://{BUCKET}/sp ace/ü%20#b=c/ö")
    store.create("data/a", b"1")
    objects = boto3.client("s3").list_objects_v2(Bucket=BUCKET, Prefix="sp ace")["Contents"]
    assert [one["Key"] for one in objects] == ["sp ace/ü%20#b=c/ö/data/a"]
    assert store.sizes() == {"data/a": 1} and store.read("data/a") == b"1"
    with pytest.raises(ConfigError, match="empty path segment"):
        connect(f"s3://{BUCKET}/a//b")


def _keys_in_files(folder: Path, monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    """Have keys in the files of the AWS tools alone."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    for key, text in (("AWS_CONFIG_FILE", config), ("AWS_SHARED_CREDENTIALS_FILE", KEYS)):
        (folder / key).write_text(text)
        monkeypatch.setenv(key, str(folder / key))


def test_keys_and_endpoint_of_a_profile(
    server: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = "[profile lab]\nregion = eu-west-1\nendpoint_url = {}\n"
    _keys_in_files(tmp_path, monkeypatch, profile.format(server.url))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert connect(f"s3://{BUCKET}/profile").create("a", b"1")
    signed = server.last["HTTP_AUTHORIZATION"]
    assert "Credential=of-the-lab/" in signed and "/eu-west-1/s3/" in signed
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match=r"profile \(nobody\) could not be found"):
        connect(f"s3://{BUCKET}/profile")


def test_no_keys_for_a_bucket_of_anyone(
    server: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _keys_in_files(tmp_path, monkeypatch, "")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert connect(f"s3://{BUCKET}/anonymous").create("a", b"1")
    assert "HTTP_AUTHORIZATION" not in server.last


def test_the_configuration_of_fsspec_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", "http://x")
    with pytest.raises(ConfigError, match=r"FSSPEC_S3_ENDPOINT_URL is not sup.*AWS_ENDPOINT_URL"):
        connect("s3://a/b")
