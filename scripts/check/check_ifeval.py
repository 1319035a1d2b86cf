"""Recompute the IFEval scores of published answers, to compare them with table 3 of the paper
(arXiv 2311.07911). This checks `batchgen.follows_instruction`.

    python scripts/check/check_ifeval.py input_data.jsonl input_response_data_gpt4.jsonl

Both files are in google-research/instruction_following_eval/data. A line of the first has a prompt
with its `instruction_id_list` and `kwargs`; a line of the second has a `prompt` and its `response`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from batchgen import follows_instruction


def main(prompts: str, responses: str) -> None:
    """Print the share of prompts and of instructions that are followed, strictly and loosely.

    A prompt is followed if all of its instructions are. `prompts` and `responses` are the paths of
    the two files.
    """
    answers = {row["prompt"]: row["response"] for row in _lines(responses)}
    for loose in (False, True):
        verdicts = [
            [
                follows_instruction(name, kwargs, answers[row["prompt"]], loose=loose)
                for name, kwargs in zip(row["instruction_id_list"], row["kwargs"], strict=True)
            ]
            for row in _lines(prompts)
        ]
        all_verdicts = [verdict for row in verdicts for verdict in row]
        prompt_share = sum(map(all, verdicts)) / len(verdicts)
        instruction_share = sum(all_verdicts) / len(all_verdicts)
        mode = "loose" if loose else "strict"
        print(f"{mode}: prompts {prompt_share:.2%}, instructions {instruction_share:.2%}")


def _lines(path: str) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main(*sys.argv[1:])
