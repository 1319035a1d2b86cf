"""Plans of real jobs with a tiny model, and what jobs keep of their own predictions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from batchgen.__main__ import run_command
from batchgen.config.compose.compose_config import compose
from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.caches.model_caches import row_bytes
from batchgen.engine.interface.engine_config import EngineConfig, Sizes
from batchgen.engine.memory.expected_memory import expected_memory
from batchgen.engine.memory.memory_plan import Room, divide_memory
from batchgen.engine.memory.model_use import ModelUse
from batchgen.jobs.planning.job_plan import Plan
from batchgen.jobs.planning.plan_settings import PlanSettings
from batchgen.jobs.planning.plan_text import plan_text
from batchgen.jobs.planning.planner import make_plan
from batchgen.jobs.resolve.open_job import open_job, resolve_job
from batchgen.storage.stores.manifest import Manifest
from batchgen.util.errors import ConfigError
from batchgen.util.request_id import RequestId
from tests.support.jobs.real_job import VOCAB, contents, overrides, save_tokenizer


def configured(model: Path, rows: Path, out: Path, *more: str) -> JobConfig:
    return compose({}, overrides(model, rows, out, *more))


def planned(config: JobConfig, **settings: Any) -> Plan:
    return make_plan(config, PlanSettings(**settings))


@pytest.fixture
def config(model: Path, rows: Path, tmp_path: Path) -> JobConfig:
    return configured(model, rows, tmp_path / "out")


def test_a_plan_says_what_the_job_then_is(config: JobConfig) -> None:
    plan = planned(config)
    assert not Path(config.output.dir).exists()
    engine = resolve_job(config).build_engine()
    assert plan.memory == engine.memory
    assert plan.engine.settings == engine.config  # type: ignore[attr-defined]
    assert plan.scan.num_rows == 11 and plan.answers == 22
    opened = open_job(config)
    lengths = [len(opened.prompt.token_ids(row)) for row in opened.source.rows()]
    assert plan.scan.lengths.tolist() == lengths
    assert plan.forecast is not None and plan.forecast.device == "cpu"
    assert plan.disk is not None and plan.disk.free > plan.disk.output.likely > 0
    assert not plan.errors and not plan.warnings


def test_the_engine_knows_how_long_its_rows_are(config: JobConfig) -> None:
    engine = resolve_job(config).build_engine()
    params = replace(config.params, max_new_tokens=9, ignore_eos=True)
    for row, prompt in enumerate(([1, 2, 3], [4])):
        engine.add_request(RequestId("", row, 0), prompt, params)
    assert engine.running_lengths.tolist() == []
    for tokens in range(1, 9):
        engine.step()
        assert engine.running_lengths.tolist() == [tokens, tokens]
    engine.step()
    assert engine.running_lengths.tolist() == []


@pytest.mark.quick(1)
@pytest.mark.parametrize("gpu", [None, 4 * 2**30])
def test_the_expected_memory_counts_states_of_rows(gpu: int | None) -> None:
    from tests.support.engine.toy_hybrid import make_toy

    toy = ModelUse(make_toy("meta"), widths=(1,))
    device, sizes = torch.device("cpu" if gpu is None else "cuda"), Sizes(10**6, 10**6, gpu or 0, 1)
    settings = EngineConfig(max_num_seqs=8).resolve(device, sizes, 256)
    plan = expected_memory([toy], settings, gpu)
    given = Room(plan.kv_cache + plan.row_states + plan.checkpoints + 2**20, plan.work_space, gpu)
    assert plan == divide_memory([toy], settings, given)
    specs = toy.model.cache_specs
    assert plan.row_states == 9 * row_bytes(specs, 1, settings.fold) > 0
    assert plan.total == gpu and (plan.work_space > 0) == (gpu is not None)
    assert plan.weights == toy.model.num_parameters * 4
    too_many = 10**6 if gpu is None else gpu // plan.weights + 1
    with pytest.raises(ValueError, match="the weights need"):
        expected_memory([toy] * too_many, settings, gpu)


def test_a_mixture_of_experts_and_columns_of_every_scope(
    tiny_model: Callable[..., Path], rows: Path, tmp_path: Path
) -> None:
    model = tiny_model("qwen3_moe", **VOCAB)
    save_tokenizer(model)
    columns = "output.columns=routed_experts,prompt_token_ids,logprobs,top_logprobs"
    plain, more = (
        planned(configured(model, rows, tmp_path / "out", *given), device="H100")
        for given in ((), (columns,))
    )
    assert 0 < more.engine.sizes.share < 1
    assert more.engine.token_bytes > plain.engine.token_bytes  # the plane of the experts
    assert more.disk is not None and plain.disk is not None
    assert more.disk.output.likely > 1.5 * plain.disk.output.likely


def test_no_file_of_weights_is_read(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "batchgen.inputs.model.open_model.load_model",
        lambda *_, **__: pytest.fail("weights are loaded"),
    )
    planned(config)
    planned(config, device="H100")


def test_a_plan_for_a_gpu_has_its_memory_and_its_hours(config: JobConfig) -> None:
    priced = replace(config, budget=replace(config.budget, price_per_hour=2.0))
    plan = planned(priced, device="H100")
    assert plan.memory is not None and plan.memory.total is not None
    assert plan.engine.settings.cuda_graph and plan.engine.settings.max_batched_tokens == 8192
    assert plan.device_hours is not None and plan.price is not None
    assert plan.price.likely == pytest.approx(2 * plan.device_hours.likely)
    assert "GPU hours" in plan_text(plan)
    assert "GPU hours" not in plan_text(planned(config, device="cpu"))


def test_a_plan_for_two_gpus_divides_the_model_and_counts_both(config: JobConfig) -> None:
    config = replace(config, budget=replace(config.budget, price_per_hour=2.0))
    one = planned(config, device="H100")
    halved = replace(config, engine=replace(config.engine, tensor_parallel=2))
    two = planned(halved, device="H100")
    assert two.engine.weight_bytes < 0.6 * one.engine.weight_bytes  # norms are on both
    assert two.engine.token_bytes == one.engine.token_bytes // 2
    assert two.forecast is not None and two.device_hours is not None and two.price is not None
    assert two.device_hours.likely == pytest.approx(2 * two.forecast.seconds.likely / 3600)
    assert two.price.likely == pytest.approx(2 * two.device_hours.likely)
    assert "on each of 2 GPUs" in " ".join(plan_text(two).split())


def test_what_is_on_the_disk_is_about_what_was_planned(
    config: JobConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(config)
    assert plan.disk is not None
    from batchgen.jobs.run.run_job import execute_job

    execute_job(config, resolve_job(config))
    shards = sum(path.stat().st_size for path in Path(config.output.dir, "data").glob("*.parquet"))
    # Three shards of four rows: mostly footers, of which the plan has one for all.
    assert shards / 4 < plan.disk.output.likely < shards * 1.5


@pytest.mark.thorough
def test_a_job_says_how_long_those_like_it_take(
    config: JobConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    from batchgen.jobs.run.run_job import execute_job

    execute_job(config, resolve_job(config))
    folder = Path(config.output.dir)
    attempt = json.loads((folder / "metrics.json").read_text())["attempts"][-1]
    assert 0 < attempt["start_s"] < attempt["wall_s"]
    again = planned(config)  # the folder itself says how long answers are
    assert again.folder.done == 22 and again.answers == 0
    other = compose({}, [*overrides_of(config), f"output.dir={folder}_2"])
    like = planned(other, like=str(folder))
    assert like.forecast is not None
    assert like.forecast.generated_tokens.likely == pytest.approx(
        attempt["generated_tokens"], rel=0.01
    )
    assert like.forecast.start_s == pytest.approx(attempt["start_s"])
    assert f"the job in {folder}" in like.forecast.assumptions[1]
    # On another kind of device it says how long answers get, and nothing of the speed.
    gpu = planned(other, like=str(folder), device="H100").forecast
    assert gpu is not None and gpu.start_s != like.forecast.start_s
    assert (
        "by published figures" in gpu.assumptions[0]
        and f"the job in {folder}" in gpu.assumptions[1]
    )


def overrides_of(config: JobConfig) -> list[str]:
    """The arguments that made the configuration, with another folder."""
    return overrides(
        Path(config.model.path), Path(str(config.dataset.path)), Path(config.output.dir)
    )[:-1]


def test_a_plan_says_whether_the_budget_suffices(model: Path, rows: Path, tmp_path: Path) -> None:
    limits = ["budget.tokens=10", "budget.minutes=1e6", "budget.price_per_hour=2"]
    plan = planned(configured(model, rows, tmp_path / "out", *limits))
    assert [one.verdict for one in plan.outlook] == ["will not suffice", "suffices"]
    assert plan.price is not None and plan.outlook[0].needed.low > 10
    assert plan.warnings == [
        "the job will likely stop before its end, with exit code 4: " + plan.outlook[0].text
    ]
    assert not plan.errors and "budget.minutes suffices: 16666:40:00" in plan_text(plan)


def test_a_folder_without_answers_is_no_example(config: JobConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the output of a job"):
        planned(config, like=str(tmp_path))


def test_the_folder_of_another_job_is_an_error_of_the_plan(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = overrides(model, rows, tmp_path / "out")
    assert run_command(arguments) == 0
    before = contents(tmp_path / "out")
    assert run_command(["plan", *arguments, "sampling.seed=9"]) == 1
    shown = capsys.readouterr().out
    assert "ERROR" in shown and "sampling.seed: 3 → 9" in shown
    assert run_command(["plan", *arguments]) == 0
    assert "22 are there" in capsys.readouterr().out
    assert contents(tmp_path / "out") == before
    assert Manifest.read(tmp_path / "out" / "manifest.json")


def test_a_cache_that_is_too_small_is_an_error(model: Path, rows: Path, tmp_path: Path) -> None:
    config = configured(
        model, rows, tmp_path / "out", "engine.kv_cache_gib=0.00001", "engine.max_model_len=256"
    )
    plan = planned(config)
    assert plan.memory is None and plan.forecast is None
    assert "engine: the KV cache would have" in plan.errors[0]


def test_constraints_are_compiled_and_the_bad_ones_are_bad_rows(
    model: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    patterns = ["[a-z]+", "[a-z]+", "(?=x)y", "\\d{3}"]
    rows.write_text(
        "".join(
            json.dumps({"id": f"r{i}", "q": "?", "p": p}) + "\n" for i, p in enumerate(patterns)
        )
    )
    config = configured(model, rows, tmp_path / "out", "constraint=regex", "constraint.column=p")
    plan = planned(config, most_bad=0.5)
    assert plan.scan.bad["bad_constraint"].rows == [(2, "r2")]
    assert planned(config).errors


def test_json_has_everything(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", *overrides(model, rows, tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 11 and found["prompt_tokens"]["max"] > 0
    assert found["forecast"]["seconds"]["likely"] > 0
    assert found["memory"]["kv_tokens"] > 0 and found["rows_at_once"] >= 1
    assert found["errors"] == [] and found["bad_rows"] == {} and found["launcher"] is None


def test_a_plan_says_what_comes_from_the_prefix_cache(model: Path, tmp_path: Path) -> None:
    """Two documents of four blocks, with three questions of six tokens about each."""
    documents = [[5 + (first + 7 * i) % 80 for i in range(64)] for first in (0, 1)]
    prompts = [[*text, *range(5 + q, 11 + q)] for text in documents for q in range(3)]
    rows = tmp_path / "tokens.jsonl"
    rows.write_text("".join(json.dumps({"id": i, "ids": p}) + "\n" for i, p in enumerate(prompts)))
    given = overrides(model, rows, tmp_path / "out", "sampling.n=1", "engine.block_size=16")
    given = [each for each in given if "prompt.user" not in each]
    given += ["prompt=tokens", "prompt.token_ids_column=ids"]
    plan = planned(compose({}, given))
    assert plan.forecast is not None and plan.forecast.prompt_tokens == 6 * 70
    # Each row but the first of each document shares four blocks with the row before.
    assert plan.forecast.computed_tokens == round(6 * (70 - 4 * 64 / 5))
    assert "113 tokens to compute, about 307 from the cache" in plan_text(plan)
    without = planned(compose({}, [*given, "engine.prefix_caching=false"]))
    assert without.forecast is not None and without.forecast.computed_tokens == 6 * 70
    assert "from the cache" not in plan_text(without)


def test_a_job_file_is_planned(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        yaml.safe_dump(
            {"model.path": str(model), "dataset.path": str(rows), "prompt.user": "{{ q }}"}
        )
    )
    more = ["sampling.max_new_tokens=9", "engine.device=cpu", "launcher.workers=2"]
    assert run_command(["plan", str(file), *more]) == 0
    printed = capsys.readouterr().out
    assert "11 answers to compute" in printed
    assert "launcher     local: 2 workers" in printed and "one worker computes all rows" in printed
