"""The commands of the guide on publishing, run in their order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pyarrow as pa
import pytest
from datasets import load_dataset

from batchgen.__main__ import run_command
from batchgen.cli.verb_table import VERBS
from tests.support.jobs.finished_job import finished_job, row
from tests.support.jobs.hub_server import TOKEN, hub_server
from tests.support.jobs.token_job import CHAT, PROMPT, scored_job

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "publish.md"


def test_the_commands_of_the_guide_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [["yes", "no"], ["no", "yes"], ["yes", "Yes"]]
    rows = [row(i, k, text=text) for i, both in enumerate(texts) for k, text in enumerate(both)]
    for name in ("out", "second"):
        job = finished_job(tmp_path / name, rows, graded=True)
        (job / "README.md").write_text("---\ntags:\n- batchgen\n---\n")
    scored_job(tmp_path / "teacher")
    drawn = [row(0, prompt_token_ids=[1])]
    finished_job(tmp_path / "rollouts", drawn, [PROMPT], config={"prompt": CHAT})
    traced = row(0, text="yes", prompt_token_ids=[1], step_map=[2, 1, 2])
    whole = {key: list[int]() for key in ("tail_token_ids", "tail_step_map")}
    fields = [pa.field(name, pa.list_(pa.int32())) for name in ("step_map", *whole)]
    finished_job(tmp_path / "traces", [traced | whole], [PROMPT, *fields], graded=True)
    ran = []
    guide = GUIDE.read_text().replace("\\\n", " ")
    commands = re.findall(r"^    batchgen (.*)$", guide, re.MULTILINE)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with hub_server() as hub:
        from huggingface_hub import constants

        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "".join(template[1:])
        )
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        for command in commands:
            arguments = shlex.split(command)
            if arguments[0] in VERBS:
                assert run_command(arguments) == 0, command
                ran.append(arguments[0])
    assert {name: ran.count(name) for name in VERBS if name in ran} == {
        "export": 10, "select": 4, "push": 3,
    }  # fmt: skip
    written = sorted(path.name for path in tmp_path.glob("*.*"))
    assert written == [
        "dpo.parquet", "given.jsonl", "kto.jsonl.gz", "prompts.parquet", "results.jsonl",
        "rollouts.parquet", "sft.jsonl", "teacher.parquet", "traces.jsonl",
    ]  # fmt: skip
    for folder in ("right", "best", "short", "both", "sft"):
        assert len(load_dataset(folder, split="train", cache_dir=str(tmp_path / "cache"))) > 0
    assert set(hub.repos) == {"me/answers", "me/right"}
