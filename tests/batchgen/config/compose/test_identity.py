"""Which keys decide the rows of a job: all that can change a token are part of its identity, of its
rows' keys and of addresses of steps; and a key at its default is part of none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.config.compose.compose_config import compose
from batchgen.config.compose.config_identity import (
    _IN_FIRST_VERSION,
    _NOT_DECIDING,
    config_identity,
)
from batchgen.config.groups.config_keys import choice_values, choices
from batchgen.config.groups.job_config import EngineGroup, JobConfig, ModelGroup
from batchgen.engine.sampling import sampling_params
from batchgen.inputs.prompts.row_request import RowRequest
from batchgen.jobs.resolve.open_job import resolve_job
from batchgen.jobs.reuse.row_key import RowKeys
from batchgen.jobs.run.run_job import execute_job
from batchgen.pipelines.run.addresses import addresses
from batchgen.pipelines.run.pipeline import PipelineStep
from batchgen.util.errors import ConfigError

PRINTS = {"model": "m", "dtype": "float32"}
MODEL: dict[str, Any] = {
    "dtype": "bfloat16", "load_format": "gguf", "quantization": "fp8", "trust_remote_code": True,
    "path": "other", "name": "other", "revision": "other", "lora": "other",
    "lora_column": "other", "lora_grid": True, "lora_fold": True,
    "lora_template": "adapter", "kv_cache_dtype": "fp8",
}  # fmt: skip
PRINTED = ("path", "name", "revision", "lora")
"""What these decide, the fingerprints of the files of model and adapters say."""
OF_ROWS = ("lora_column", "lora_grid")
"""Keys that choose an adapter for each row, by whose digest row keys know it."""
ENGINE: dict[str, Any] = {
    "device": "cpu", "max_num_seqs": 3, "max_batched_tokens": 64, "chunk_tokens": 64,
    "image_tokens": 64, "max_model_len": 300, "block_size": 4, "prefix_caching": False,
    "kv_cache_gib": 0.02, "state_checkpoints": 2, "cuda_graph": False,
    "gpu_memory_utilization": 0.5, "overlap": True, "deterministic": True, "tensor_parallel": 2,
    "lora_slots": 2,
}  # fmt: skip
STRATEGY: dict[str, dict[str, Any]] = {
    "ar": {},
    "ar_spec": {
        "proposer": "mtp", "num_spec_tokens": 2, "verifier": "rejection", "adaptive": False,
        "ngram_min": 1, "ngram_max": 5, "ngram_pool": True, "draft_model": "other",
        "acceptance_floor": 0.0,
    },
    "dllm": {
        "block_length": 8, "unmasking": "sequential", "confidence_threshold": 0.5,
        "denoising_steps": 2, "fused_commit": False, "min_tokens_per_step": 2,
        "entropy_bound": 0.5, "edit_threshold": 0.5, "max_edit_steps": 2, "sub_block_length": 4,
    },
    "canvas": {
        "max_denoising_steps": 3, "entropy_bound": 0.5, "start_temperature": 0.9,
        "end_temperature": 0.3, "stable_steps": 2, "stop_entropy": 0.1,
    },
}  # fmt: skip


def job(*overrides: str) -> JobConfig:
    return compose({}, ["model=hf", "model.path=m", *overrides])


def written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace("'", "")


def marks(config: JobConfig) -> tuple[Any, bytes, str]:
    """What tells a job from others: its identity, the key of a row, and its address as a step."""
    request = RowRequest([1, 2], replace(config.params, seed=1))
    step = {"a": PipelineStep("a", config, ())}
    return (
        config_identity(config),
        RowKeys(config, PRINTS, 512).key(request),
        addresses(step, {"a": PRINTS})["a"][0],
    )


def walked() -> Iterator[tuple[str, str, Any]]:
    """Every key of model, engine and strategy: what goes with it, the key, another value."""
    for name, group, values in (("hf", "model", MODEL), ("default", "engine", ENGINE)):
        assert values.keys() == choice_values(group, name).keys(), "a key is without another value"
        for key, value in values.items():
            yield "model.lora=[a]" * key.startswith("lora_"), f"{group}.{key}", value
    for choice in choices("strategy"):
        known = choice_values("strategy", choice).keys() - {"_target_"}
        assert STRATEGY[choice].keys() == known, "a key is without another value"
        for key, value in STRATEGY[choice].items():
            yield f"strategy={choice}", f"strategy.{key}", value


@pytest.mark.quick(5)
@pytest.mark.parametrize(("beside", "key", "value"), list(walked()))
def test_a_key_that_can_change_a_token_tells_jobs_apart(beside: str, key: str, value: Any) -> None:
    """The others of the engine are those of the next test."""
    group, _, name = key.partition(".")
    first = [beside] if beside else []
    try:
        changed = marks(job(*first, f"{key}={written(value)}"))
    except ConfigError:
        assert name == "trust_remote_code"
        return
    different = [old != new for old, new in zip(marks(job(*first)), changed, strict=True)]
    if key == "engine.max_model_len" or name in OF_ROWS:  # row keys have what holds, given beside
        assert different == [True, False, True]
    elif group == "engine" or name in PRINTED:
        assert different == [False] * 3 and name in _NOT_DECIDING[group]
    else:
        assert different == [True] * 3


def test_a_quote_that_is_the_usual_one_tells_no_jobs_apart() -> None:
    files = ["dataset=files", "dataset.path=a.tsv"]
    usual, same, other = (
        marks(job(*files, *more))
        for more in ([], ["dataset.quote_char='\"'"], ["dataset.quote_char=null"])
    )
    assert usual == same and usual[0] != other[0]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    return computed(tmp_path_factory.mktemp("rows") / "out")


def computed(out: Path, *overrides: str) -> pa.Table:
    config = compose(
        {},
        [
            "model=nano_hybrid", "dataset=nano_eval", "dataset.limit=2",
            "prompt.user={{ question }}", "sampling=sample", "sampling.n=2",
            "sampling.temperature=2", "sampling.max_new_tokens=6",
            "output.columns=[logprobs]", "output.report=false", f"output.dir={out}",
            "engine.kv_cache_gib=0.01", "engine.max_num_seqs=4", *overrides,
        ],
    )  # fmt: skip
    execute_job(config, resolve_job(config))
    return pq.read_table(out / "data/part-00000.parquet").replace_schema_metadata()


@pytest.mark.quick(2)
# test_lora_job.py has rows with adapters for lora_slots.
@pytest.mark.quick(1, thorough=4)
@pytest.mark.parametrize("key", sorted({*_NOT_DECIDING["engine"]} - {"device", "lora_slots"}))
def test_rows_are_equal_under_any_other_key_of_the_engine(
    key: str, rows: pa.Table, tmp_path: Path
) -> None:
    found = computed(tmp_path / "out", f"engine.{key}={written(ENGINE[key])}")
    if key == "tensor_parallel":  # sums of two ranks are rounded in another way, as on GPUs
        both = zip(rows["logprobs"].to_pylist(), found["logprobs"].to_pylist(), strict=True)
        assert all(one == pytest.approx(other, abs=1e-5) for one, other in both)
        rows, found = rows.drop(["logprobs"]), found.drop(["logprobs"])
    assert found == rows


def test_a_new_key_at_its_default_is_part_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that a later version adds to any group tells jobs apart at another value alone."""
    before = marks(job())

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class NewModel(ModelGroup):
        codes: str | None = None

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class NewEngine(EngineGroup):
        cache_dtype: str = "auto"

    def groups(model: str | None, engine: str) -> JobConfig:
        config = job()
        of_model = {f.name: getattr(config.model, f.name) for f in dataclasses.fields(ModelGroup)}
        return replace(
            config,
            model=NewModel(**of_model, codes=model),
            engine=NewEngine(**dataclasses.asdict(config.engine), cache_dtype=engine),
        )

    assert marks(groups(None, "auto")) == before
    for other in (groups("int4", "auto"), groups(None, "fp8")):
        assert all(old != new for old, new in zip(before, marks(other), strict=True))


def test_a_new_option_of_a_strategy_at_its_default_is_part_of_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = marks(job())
    values = {**choice_values("strategy", "ar"), "branches": 1}
    monkeypatch.setattr(
        "batchgen.config.compose.config_identity.choice_values",
        lambda group, choice: values if group == "strategy" else choice_values(group, choice),
    )
    config = job()
    for branches, same in ((1, True), (2, False)):
        strategy = replace(config.strategy, options={"branches": branches})
        found = marks(replace(config, strategy=strategy))
        assert [old == new for old, new in zip(before, found, strict=True)] == [same] * 3


def test_a_new_parameter_at_its_default_is_in_no_key_of_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class NewParams(sampling_params.RequestParams):
        top_h: float = 1.0

    config, keys = job(), RowKeys(job(), PRINTS, 512)
    given = {f.name: getattr(config.params, f.name) for f in dataclasses.fields(config.params)}
    monkeypatch.setattr(
        "batchgen.jobs.reuse.row_key._DEFAULTS", dataclasses.asdict(NewParams()), raising=True
    )
    before, new = (keys.key(RowRequest([1], p)) for p in (config.params, NewParams(**given)))
    other = keys.key(RowRequest([1], NewParams(**given, top_h=0.5)))
    assert before == new != other


def test_every_group_of_an_identity_is_in_the_table_of_first_keys() -> None:
    assert set(_IN_FIRST_VERSION) == set(
        config_identity(job("constraint=choice", "constraint.choices=[a]"))
    )
