"""The mode price of bench_engine.py: what `engine.deterministic` costs, or how much slower another
model is. Two engines (A and B) take turns on one GPU, each in its own process."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from measuring import DEVICE, commas
from modes.determinism import fewer_layers
from modes.routing import expert_layers, run_rows, set_routing
from modes.row_probe import Pictures
from shapes import MODELS
from workloads import WORKLOADS, dummy_model, prompt_vocab, requests

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.engine.vision.image_span import ImageRules
from batchgen.kernels.library import keep_one_order
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy

_PICTURE_SIDE = 24
"""The most tokens of a picture's side."""


@dataclass(frozen=True)
class Timed:
    """What one engine runs: the first rows of workloads, on the first layers of a model.

    Attributes:
        layers: how many layers; 0 is all.
        requests: the most rows of a workload.
        scored: whether rows score a given answer, as long as their output would be, and generate
            nothing.
        pictures: whether a picture stands before each prompt.
    """

    model: str
    layers: int
    workloads: tuple[str, ...]
    requests: int
    cache_gib: float
    scored: bool
    pictures: bool

    def serve(self, deterministic: bool, calls: Connection[Any, Any]) -> None:
        """Run each workload once and send None. Then time each workload whose name comes through
        `calls`, and send its seconds. Never returns."""
        if deterministic and DEVICE.type == "cuda":
            keep_one_order()
        changes = fewer_layers(self.model, self.layers) if self.layers else {}
        model = dummy_model(self.model, DEVICE, vision=self.pictures, **changes)
        config = EngineConfig(
            max_num_seqs=256,
            max_model_len=2304 + self.pictures * (_PICTURE_SIDE**2 + 2),
            kv_cache_gib=self.cache_gib,
            deterministic=deterministic,
        )
        strategy: Strategy = ARStrategy()
        if model.config.diffusion is not None:
            strategy = DLLMStrategy(4, unmasking="low_confidence_static", denoising_steps=2)
        engine = LLMEngine(model, None, (), strategy, config)
        if expert_layers(model):
            set_routing(model, "uniform")  # after the engine has checked the routers' products
        engine.capture_graphs()
        rules = model.visual.config.rules if model.visual is not None else None
        for workload in self.workloads:
            run_rows(engine, self._rows(workload, engine.vocab_size, rules, 0))
        calls.send(None)
        for turn in count(1):
            rows = self._rows(calls.recv(), engine.vocab_size, rules, turn)
            calls.send(run_rows(engine, rows)[0])

    def _rows(
        self, workload: str, size: int, rules: ImageRules | None, turn: int
    ) -> list[tuple[Any, ...]]:
        """Make the rows of a workload. Each turn has prompts that the prefix cache does not have.
        `size` is the vocabulary's; `rules` are those of images, None without pictures."""
        vocab, rows = prompt_vocab(size), list[tuple[Any, ...]]()
        pictures = None if rules is None else Pictures(rules, _PICTURE_SIDE)
        if pictures is not None:
            vocab = pictures.vocab(vocab)
        draws = random.Random(turn)
        for each in requests(workload, vocab)[: self.requests]:
            prompt, new = [(token + turn) % vocab for token in each.prompt], each.output_len
            if self.scored:
                params = RequestParams(max_new_tokens=0)
                answer = [(7 * place + turn) % vocab for place in range(new)]
            else:
                params = RequestParams(temperature=0, max_new_tokens=new, ignore_eos=True)
                answer = None
            images = []
            if pictures is not None:
                tokens, image = pictures.draw(draws)
                prompt, images = [*tokens, *prompt], [image]
            rows.append((prompt, params, answer, images))
        return rows


class Process:
    """An engine in a separate process, because the mode is set for a whole process."""

    def __init__(self, timed: Timed, deterministic: bool) -> None:
        context = get_context("spawn")
        self._calls, child = context.Pipe()
        arguments = deterministic, child
        self._process = context.Process(target=timed.serve, args=arguments, daemon=True)
        self._process.start()
        child.close()

    def wait(self) -> None:
        """Wait until the engine is ready."""
        self._calls.recv()

    def seconds(self, workload: str) -> float:
        """Run a workload in the process, and return its seconds."""
        self._calls.send(workload)
        return float(self._calls.recv())

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=commas(str, MODELS), required=True)
    parser.add_argument("--against", type=commas(str, MODELS), help="B of each, without the mode")
    parser.add_argument("--workloads", type=commas(str, WORKLOADS), default=["mixed", "decode"])
    parser.add_argument("--layers", type=int, default=12, help="the first N layers; 0: all")
    parser.add_argument("--requests", type=int, default=256, help="the most rows of a workload")
    parser.add_argument("--scored", action="store_true", help="answers are scored")
    parser.add_argument("--pictures", action="store_true", help="one before each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache-gib", type=float, default=6.0, help="KV cache of each engine")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time workloads without the mode (A), and with it or on another model (B): A B A B A B.

    Both engines are on the same card and take turns. Tokens go to random experts. The output is the
    difference between the medians and the spread of A, (maximum - minimum) / median. The processes
    of all models start at once and run one model after the other.
    """
    workloads = tuple(options.workloads)
    pairs = []
    for name, other in zip(options.models, options.against or options.models, strict=True):
        sizes = options.requests, options.cache_gib, options.scored, options.pictures
        both = (Timed(each, options.layers, workloads, *sizes) for each in (name, other))
        modes = (False, not options.against)
        pairs.append((name, [Process(*each) for each in zip(both, modes, strict=True)]))
    for _, processes in pairs:
        for process in processes:
            process.wait()
    results = []
    for name, processes in pairs:
        for workload in workloads:
            turns = [[each.seconds(workload) for each in processes] for _ in range(options.rounds)]
            result = {"model": name, "layers": options.layers, "workload": workload}
            results.append(result | compared(*zip(*turns, strict=True)))
            print("{model}, {workload}: {A} / {B}, {difference:+.1%}".format(**results[-1]), end="")
            print(f", spread {results[-1]['spread']:.1%}", flush=True)
        for process in processes:
            process.close()
    return results


def compared(without: Sequence[float], with_mode: Sequence[float]) -> dict[str, Any]:
    """Compare the seconds of A's and of B's runs."""
    middle = median(without)
    return {
        "A": [round(each, 3) for each in without],
        "B": [round(each, 3) for each in with_mode],
        "difference": median(with_mode) / middle - 1,
        "spread": (max(without) - min(without)) / middle,
    }
