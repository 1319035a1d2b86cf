"""The task of nano_sdar and nano_hybrid: worked answers in plain text and in JSON, half of each."""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from nano_learning import Batch, Recipe, chat, pad, tally
from nano_problems import FORMS, Form, Problem, final_number, held_out_set, problems, row_json
from nano_text import SDAR, SEQUENCE_LENGTH, Hybrid
from nano_tokenizer import build_tokenizer

from batchgen import LLM, SamplingParams
from batchgen.engine.base.engine_config import EngineConfig

MOST_TOKENS = 100
"""The most tokens of an answer in an exam."""
NOISE_SEED = 1234
"""The seed of the noise of the held-out loss."""


def encode(rows: Iterable[Problem], form: Form, device: torch.device) -> Batch:
    """Encode problems with their answers, of N = SEQUENCE_LENGTH."""
    chats = (chat(row.request(form).encode(), row.answer(form)) for row in rows)
    parts = (torch.from_numpy(part).long().to(device) for part in pad(chats, SEQUENCE_LENGTH))
    ids, prompt_lens, lens = parts
    return Batch(ids, prompt_lens, lens)


class Sums:
    """Training rows on a device, and an exam in which the engine answers greedily."""

    def __init__(self, args: Namespace, learner: SDAR | Hybrid) -> None:
        self._args, self._learner = args, learner
        self._held_out = held_out_set(args.eval_count, args.seed)
        self.tokenizer = build_tokenizer()

    def draw(self, device: torch.device) -> None:
        stream, half = problems("train", self._args.seed), self._args.examples // len(FORMS)
        forms = [encode(itertools.islice(stream, half), form, device) for form in FORMS]
        self._rows = [torch.cat(parts) for parts in zip(*(each[:3] for each in forms), strict=True)]

    def batch(self, step: int, progress: float, generator: torch.Generator) -> Batch:
        many, size, device = len(self._rows[0]), (self._args.batch_size,), self._rows[0].device
        index = torch.randint(many, size, device=device, generator=generator)
        ids, prompt_lens, lens = (part[index] for part in self._rows)
        return Batch(ids, prompt_lens, lens)

    def grade(self, folder: Path, count: int) -> dict[str, dict[str, Any]]:
        """Grade answers in both forms: the loss, right ones, and tokens per forward.

        A forward that only made KV final, of strategy=dllm, does not count.
        """
        rows, device = self._held_out[:count], next(self._learner.module.parameters()).device
        llm = LLM(
            str(folder),
            device=device.type,
            strategy=self._learner.strategy,
            config=EngineConfig(kv_cache_gib=0.25, prefix_caching=False),
        )
        params = SamplingParams(temperature=0, max_new_tokens=MOST_TOKENS)
        grades: dict[str, dict[str, Any]] = {}
        for form in FORMS:
            prompts = [[{"role": "user", "content": row.request(form)}] for row in rows]
            found = defaultdict(list)
            for row, (output,) in zip(rows, llm.generate(prompts, params), strict=True):
                right = final_number(output.text or "", form) == row.final
                forwards = output.counts["num_forwards"]
                forwards -= output.counts.get("num_commit_forwards", 0)
                found[row.kind].append((right, len(output.token_ids), forwards))
            kinds = {kind: _tally(each) for kind, each in sorted(found.items())}
            everything = _tally([*itertools.chain(*found.values())])
            grades[form] = {"loss": self.loss(rows, form), **everything, "by_kind": kinds}
        return grades

    def loss(self, rows: list[Problem], form: Form) -> float:
        """Nats per token of the answers, with the same noise on every call."""
        device = next(self._learner.module.parameters()).device
        generator = torch.Generator(device).manual_seed(NOISE_SEED)
        with torch.inference_mode():
            return float(self._learner.held_out_loss(encode(rows, form, device), generator))

    def write_eval_set(self, folder: Path) -> None:
        lines = [row_json(index, problem) for index, problem in enumerate(self._held_out)]
        (folder / "eval.jsonl").write_text("\n".join(lines) + "\n")

    def close(self) -> None:
        pass


def _tally(answers: list[tuple[bool, int, int]]) -> dict[str, Any]:
    rights, tokens, forwards = zip(*answers, strict=True)
    return {**tally(rights), "tokens_per_step": round(sum(tokens) / sum(forwards), 4)}


RECIPES = {
    "nano_sdar": Recipe(SDAR, Sums, {
        "steps": 12_000, "minutes": 5.5, "batch_size": 256, "lr": 1e-3, "examples": 800_000,
        "eval_count": 500, "quick_count": 100, "eval_every": 1000, "hidden_size": 256, "layers": 6,
        "block_size": 4,
    }),
    "nano_hybrid": Recipe(Hybrid, Sums, {
        "steps": 12_000, "minutes": 5.2, "batch_size": 512, "lr": 2e-3, "examples": 600_000,
        "eval_count": 500, "quick_count": 100, "eval_every": 700, "hidden_size": 256, "layers": 8,
        "compile": True,
    }),
}  # fmt: skip
