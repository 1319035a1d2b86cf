"""The figures of IFEval for published answers, which its paper has (arXiv 2311.07911, table 3):

    python scripts/check/check_ifeval.py input_data.jsonl input_response_data_gpt4.jsonl

The files are those of google-research/instruction_following_eval/data: a prompt with
`instruction_id_list` and `kwargs` on each line, and a `prompt` with its `response`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from batchgen import follows_instruction


def main(prompts: str, responses: str) -> None:
    """Print the share of prompts and of instructions that are followed, strictly and loosely."""
    answers = {row["prompt"]: row["response"] for row in _lines(responses)}
    for loose in (False, True):
        verdicts = [
            [
                follows_instruction(name, kwargs, answers[row["prompt"]], loose=loose)
                for name, kwargs in zip(row["instruction_id_list"], row["kwargs"], strict=True)
            ]
            for row in _lines(prompts)
        ]
        every = [verdict for row in verdicts for verdict in row]
        whole = sum(map(all, verdicts)) / len(verdicts)
        each = sum(every) / len(every)
        print(f"{'loose' if loose else 'strict'}: prompts {whole:.2%}, instructions {each:.2%}")


def _lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main(*sys.argv[1:])
