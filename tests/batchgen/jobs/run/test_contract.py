"""Jobs whose rows keep their bits under one contract."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from batchgen.config.groups.job_config import EngineGroup
from batchgen.engine.device.contract import contract, sources_digest
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.jobs.reuse.row_key import RowKeys
from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_job import execute_job
from batchgen.storage.stores.manifest import CONTRACT, Manifest
from batchgen.util.errors import ConfigError
from tests.support.jobs.fake_job import FakeJob

H100, H200 = {"device": "H100", "rules": "1"}, {"device": "H200", "rules": "1"}


def run(job: FakeJob, found: Mapping[str, str] | None) -> JobResult:
    """Run under a contract, or without engine.deterministic."""
    config = job.config()
    engine = EngineGroup(max_num_seqs=job.max_num_seqs, deterministic=found is not None)
    prints = {f"{CONTRACT}{name}": text for name, text in (found or {}).items()}
    fingerprints = {"model": "fake", **prints}
    with patch.object(ResolvedJob, "contract", lambda self: found or H100):
        parts = replace(job.parts(), fingerprints=fingerprints)
        return execute_job(replace(config, engine=engine), parts)


def manifest(out: Path) -> Manifest:
    return Manifest.read(out / "manifest.json")


def begun(out: Path, found: Mapping[str, str] | None) -> FakeJob:
    """A job that has failed when some of its rows were done."""
    job = FakeJob(str(out), rows=60, bad=False, fail_at_step=30)
    with pytest.raises(RuntimeError):
        run(job, found)
    return replace(job, fail_at_step=-1)


def test_a_job_goes_on_under_its_contract_alone(tmp_path: Path) -> None:
    job = begun(tmp_path, H100)
    assert manifest(tmp_path).contract == H100
    with pytest.raises(ConfigError) as refused:
        run(job, H200)
    line = 'contract of the rows\' bits, device: "H100" → "H200" (engine.deterministic=false'
    assert line in str(refused.value) and "rules" not in str(refused.value)
    assert run(job, H100).exit_code == 0
    attempts: list[dict[str, Any]] = json.loads((tmp_path / "metrics.json").read_text())["attempts"]
    assert [attempt["contract"] for attempt in attempts] == [H100, H100]
    assert manifest(tmp_path).history == []


def test_without_the_mode_it_goes_on_anywhere_and_says_so(tmp_path: Path) -> None:
    job = begun(tmp_path, H100)
    assert run(job, None).exit_code == 0
    found = manifest(tmp_path)
    assert not found.contract
    assert [entry["changed"] for entry in found.history] == [["engine.deterministic: true → false"]]


def test_rows_without_a_contract_do_not_get_one(tmp_path: Path) -> None:
    job = begun(tmp_path, None)
    with pytest.raises(ConfigError, match=r"device: \(not set\) → \"H100\""):
        run(job, H100)


def test_rows_are_copied_from_jobs_of_the_same_contract_alone(tmp_path: Path) -> None:
    config, keys = FakeJob(str(tmp_path)).config(), set()
    for found in (H100, H200, {}):
        prints = {f"{CONTRACT}{name}": text for name, text in found.items()}
        keys.add(RowKeys(config, prints, 100)._shared)
    assert len(keys) == 3


def test_what_a_contract_names() -> None:
    import torch

    found = contract(torch.device("cpu"), torch.bfloat16, 2)
    assert (found["dtype"], found["ranks"], found["device"]) == ("bfloat16", "2", "cpu")
    assert found["torch"] == torch.__version__ and found["sources"] == sources_digest()


@pytest.mark.parametrize("others", [{}, {"model": "another"}])
def test_an_audit_knows_when_nothing_but_the_contract_differs(others: dict[str, str]) -> None:
    def made(found: Mapping[str, str], **prints: str) -> Manifest:
        of_contract = {f"{CONTRACT}{name}": text for name, text in found.items()}
        return Manifest.build({}, {"model": "fake", **of_contract, **prints})

    old, new = made(H100), made(H200, **others)
    lines = old.differences(new, lambda _: None)
    assert (lines == old.other_contract(new)) == (not others)
    assert not old.differences(made({}), lambda _: None) and not old.other_contract(made({}))
