"""Task files of lm-eval with rows of their own, for tests that cannot reach a hub."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

THINGS = ("river", "engine", "cat", "library", "storm", "garden", "clock", "violin", "harbour")
DOINGS = ("sleeps under", "stands near", "remembers", "moves towards", "is older than", "follows")
CHOICE, ROLLING, GENERATION = "local_choice", "local_rolling", "local_generation"
TASKS = (CHOICE, ROLLING, GENERATION)


def write_tasks(folder: Path, choices: int, texts: int, prompts: int) -> Path:
    """Write a task of each kind with so many documents; the folder is for --include_path."""
    draw = random.Random(0)
    folder.mkdir()
    rows = {
        CHOICE: [_question(draw) for _ in range(choices)],
        ROLLING: [{"text": _story(draw, 1 + i % 12)} for i in range(texts)],
        GENERATION: [_sum(draw) for _ in range(prompts)],
    }
    for name, own in TASK_KEYS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows[name]))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        task = {"task": name, **source, "test_split": "test", **own}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder


def _metric(name: str, aggregation: str = "mean") -> dict[str, Any]:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": True}


TASK_KEYS: dict[str, dict[str, Any]] = {
    CHOICE: {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "label",
        "doc_to_choice": "choices",
        "metric_list": [_metric("acc"), _metric("acc_norm")],
    },
    ROLLING: {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [
            _metric("word_perplexity", "weighted_perplexity"),
            _metric("bits_per_byte", "bits_per_byte"),
        ],
    },
    GENERATION: {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n", ","], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [_metric("exact_match")],
        "num_fewshot": 0,
    },
}


def _question(draw: random.Random) -> dict[str, Any]:
    left, right = draw.sample(THINGS, 2)
    choices = [right, f"a {draw.choice(THINGS)}", f"the {right} at night", draw.choice("xyz")]
    draw.shuffle(choices)
    question = f"The {left} {draw.choice(DOINGS)} the {right}. What does it mention last? "
    return {"question": question, "choices": choices, "label": choices.index(right)}


def _story(draw: random.Random, sentences: int) -> str:
    parts = [
        f"The {draw.choice(THINGS)} {draw.choice(DOINGS)} the {draw.choice(THINGS)}."
        for _ in range(sentences)
    ]
    return " ".join(parts)


def _sum(draw: random.Random) -> dict[str, Any]:
    a, b, c = (draw.randrange(1, 50) for _ in range(3))
    return {"prompt": f"1 + 1 = 2\n{a} + {b} = {a + b}\n{b} + {c} =", "answer": f" {b + c}"}
