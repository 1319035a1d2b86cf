"""Train a nano model: a few million parameters that solve small arithmetic.

    python scripts/nano/train_nano.py nano_sdar --out OUT --minutes 5.5
    python scripts/nano/train_nano.py nano_hybrid --out OUT --minutes 5.2 --compile \\
        --batch-size 512 --lr 2e-3 --examples 600000 --eval-every 700
    python scripts/nano/train_nano.py nano_sdar --measure batchgen/data/nano_sdar

Half of the training problems are answered in plain text, half in JSON (see nano_problems.py). What
is written is a model folder in HuggingFace's layout, and in it held-out problems (eval.jsonl), the
JSON Schema of an answer (answer_schema.json), and what was run and measured by the engine: right
answers and tokens per forward (training.json). A seed trains on the same problems with the same
noise; sums on a GPU may differ in their last bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from nano_models import (
    IM_END_ID,
    LEARNERS,
    SEQUENCE_LENGTH,
    Batch,
    Learner,
)
from nano_problems import (
    FORMS,
    SCHEMA,
    Form,
    Problem,
    final_number,
    held_out_set,
    problems,
    row_json,
)
from nano_tokenizer import build_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from batchgen import LLM, SamplingParams
from batchgen.engine.base.engine_config import EngineConfig

WARMUP_STEPS = 200
MOST_TOKENS = 100
"""The most tokens of an answer in an exam."""
NOISE_SEED = 1234
"""The seed of the noise of the held-out loss, which is always the same."""


def encode(rows: Iterable[Problem], form: Form, tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Encode problems with their answers as a batch on the CPU, of N = SEQUENCE_LENGTH."""
    # The template is rendered only once: with one token per byte, a text can be encoded in pieces.
    message = [{"role": "user", "content": "\0"}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    head, tail = (tokenizer.encode(part, add_special_tokens=False) for part in text.split("\0"))
    # With 800,000 rows, a tensor for every row would take most of the time.
    ids, prompt_lens, lens = array("q"), [], []
    for problem in rows:
        prompt = [*head, *problem.request(form).encode(), *tail]
        tokens = [*prompt, *problem.answer(form).encode(), IM_END_ID]
        assert len(tokens) <= SEQUENCE_LENGTH, problem
        ids.extend([*tokens, *[IM_END_ID] * (SEQUENCE_LENGTH - len(tokens))])
        prompt_lens.append(len(prompt))
        lens.append(len(tokens))
    canvas = torch.frombuffer(ids, dtype=torch.int64).view(-1, SEQUENCE_LENGTH)
    return Batch(canvas, torch.tensor(prompt_lens), torch.tensor(lens))


class Exam:
    """A test of a model folder on held-out problems, in both forms."""

    def __init__(self, learner: Learner, rows: Sequence[Problem], device: torch.device) -> None:
        self._learner, self._rows, self._device = learner, rows, device

    @torch.inference_mode()
    def loss(self, form: Form) -> float:
        """Nats per token of the answers, with the same noise on every call."""
        batch = Batch(
            *(part.to(self._device) for part in encode(self._rows, form, build_tokenizer()))
        )
        generator = torch.Generator(self._device).manual_seed(NOISE_SEED)
        return float(self._learner.held_out_loss(batch, generator))

    def grade(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Let the engine answer greedily, and count right answers and tokens per forward.

        A forward that only made KV final, of strategy=dllm, does not count.
        """
        llm = LLM(
            str(folder),
            device="cuda" if self._device.type == "cuda" else "cpu",
            strategy=self._learner.strategy(),
            config=EngineConfig(kv_cache_gib=0.25, prefix_caching=False),
        )
        params = SamplingParams(temperature=0, max_new_tokens=MOST_TOKENS)
        grades: dict[str, dict[str, Any]] = {}
        for form in FORMS:
            prompts = [[{"role": "user", "content": row.request(form)}] for row in self._rows]
            found: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
            for row, (output,) in zip(self._rows, llm.generate(prompts, params), strict=True):
                right = final_number(output.text or "", form) == row.final
                counts = output.counts
                steps = counts["num_forwards"] - counts.get("num_commit_forwards", 0)
                found[row.kind].append((right, len(output.token_ids), steps))
            kinds = {kind: _tally(each) for kind, each in sorted(found.items())}
            everything = _tally([*itertools.chain(*found.values())])
            grades[form] = {"loss": self.loss(form), **everything, "by_kind": kinds}
        return grades


def _tally(answers: Sequence[tuple[int, int, int]]) -> dict[str, float]:
    right, tokens, steps = map(sum, zip(*answers, strict=True))
    return {
        "rows": len(answers),
        "accuracy": round(right / len(answers), 4),
        "tokens_per_step": round(tokens / steps, 4),
    }


def in_short(grades: dict[str, Any]) -> str:
    return "  ".join(
        f"{form}: loss {found['loss']:.4f} accuracy {found['accuracy']:.3f} "
        f"tokens/step {found['tokens_per_step']:.2f}"
        for form, found in grades.items()
    )


class Run:
    """One training run: its problems, its model, and the folder that it writes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._start = args, time.perf_counter()
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._tokenizer = build_tokenizer()
        self.learner = LEARNERS[args.model](args)
        self._held_out = held_out_set(args.eval_count, args.seed)
        stream, half = problems("train", args.seed), args.examples // len(FORMS)
        parts = [encode(itertools.islice(stream, half), form, self._tokenizer) for form in FORMS]
        self._train = Batch(
            *(torch.cat(each).to(self._device) for each in zip(*parts, strict=True))
        )
        self.learner.model.to(self._device)
        size = sum(p.numel() for p in self.learner.model.parameters())
        self._say(
            f"{args.examples} problems on {self._device}, {size / 1e6:.2f} million parameters"
        )

    def finish(self) -> None:
        """Train, measure the weights as the file holds them, and write the folder."""
        torch.set_float32_matmul_precision("high")  # products that are not in bfloat16
        steps, train_loss = self._fit()
        torch.set_float32_matmul_precision("highest")
        facts = {"steps": steps, "train_loss": train_loss, **self.learner.facts}
        self._save(facts)
        for parameter in self.learner.model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        exam = Exam(self.learner, self._held_out, self._device)
        grades = exam.grade(self._args.out)
        self._save({**facts, "held_out": grades})
        self._say(f"wrote {self._args.out}: {in_short(grades)}")

    def _fit(self) -> tuple[int, float]:
        """Train until the steps or the minutes are over, whichever comes first.

        The learning rate falls to zero by then in either case. At every evaluation the folder is
        written, so that a run that is cut short leaves a model. Returns the number of steps, and
        the mean loss of the steps between the last two evaluations.
        """
        args, begin = self._args, self._seconds
        exam = Exam(self.learner, self._held_out[: args.quick_count], self._device)
        generator = torch.Generator(self._device).manual_seed(args.seed)
        optimizer = _optimizer(self.learner.model)
        total, count, mean = torch.zeros((), device=self._device), 0, math.nan
        step, progress = 0, 0.0
        while progress < 1:
            cosine = 0.5 * (1 + math.cos(math.pi * progress))
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min((step + 1) / WARMUP_STEPS, cosine)
            total += self._update(optimizer, generator)
            step, count = step + 1, count + 1
            spent = (self._seconds - begin) / (60 * args.minutes - begin)
            progress = max(step / args.steps, spent)
            if progress >= 1 or step % args.eval_every == 0:
                mean, count = total.item() / count, 0
                total.zero_()
                self._save({"steps": step, "train_loss": mean})
                grades = exam.grade(args.out)
                self._say(f"step {step}  loss {mean:.4f}  {in_short(grades)}")
        return step, mean

    def _update(self, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> Tensor:
        size, device = (self._args.batch_size,), self._device
        rows = torch.randint(len(self._train.ids), size, device=device, generator=generator)
        with _autocast(device):
            loss = self.learner.loss(Batch(*(part[rows] for part in self._train)), generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.learner.model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    def _save(self, training: dict[str, Any]) -> None:
        folder = self._args.out
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            name: tensor.to("cpu", torch.bfloat16).contiguous()
            for name, tensor in self.learner.model.state_dict().items()
            if name != "lm_head.weight"  # it is the embedding
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        self._tokenizer.save_pretrained(folder)
        lines = [row_json(index, problem) for index, problem in enumerate(self._held_out)]
        (folder / "eval.jsonl").write_text("\n".join(lines) + "\n")
        kept = {k: v for k, v in vars(self._args).items() if k not in ("out", "measure", "model")}
        contents = {
            "config": self.learner.config,
            "answer_schema": SCHEMA,
            "training": {"arguments": kept, **training},
        }
        for name, content in contents.items():
            (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._start

    def _say(self, text: str) -> None:
        print(f"{self._seconds:4.0f} s  {text}", flush=True)


def _optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=matrices[0].is_cuda)


def _autocast(device: torch.device) -> AbstractContextManager[None]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def measure(args: argparse.Namespace) -> None:
    """Print what the exam says of a folder that was trained before."""
    learner = LEARNERS[args.model](args)
    weights = load_file(args.measure / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    learner.model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    rows = held_out_set(args.eval_count, args.seed)
    exam = Exam(learner, rows, torch.device("cpu"))
    print(json.dumps(exam.grade(args.measure), indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=LEARNERS)
    parser.add_argument("--out", type=Path, help="the folder to write")
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="train nothing")
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--minutes", type=float, default=8.0, help="all but the last measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--examples", type=int, default=800_000, help="of both forms")
    parser.add_argument("--eval-count", type=int, default=500, help="each in both forms")
    parser.add_argument("--quick-count", type=int, default=100, help="of these, in training")
    parser.add_argument("--eval-every", type=int, default=1000)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, help="default 6, of nano_hybrid 8")
    parser.add_argument("--block-size", type=int, default=4, help="of nano_sdar")
    parser.add_argument("--compile", action="store_true", help="the layers of nano_hybrid")
    args = parser.parse_args()
    args.layers = args.layers or (6 if args.model == "nano_sdar" else 8)
    if (args.out is None) == (args.measure is None):
        parser.error("give --out or --measure")
    if args.measure is not None:
        measure(args)
        return
    try:
        run = Run(args)
    except ValueError as error:
        parser.error(str(error))
    run.finish()


if __name__ == "__main__":
    main()
