"""The mode unmasking of bench_engine.py: what a step of block diffusion costs under each unmasking
rule. A denoise step predicts all masked tokens of a block, and a rule says which stay."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch
from measuring import DEVICE
from modes.engine_runs import full_batch
from modes.routing import run_rows
from shapes import MODELS
from workloads import WORKLOADS, dummy_model, prompt_vocab, requests

from batchgen.engine.device.step_timing import PhaseSplit, StepTimer
from batchgen.engine.execution.model_runner import ModelOutput
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.sampling.sampler import Drawn
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.kernels.sampling.token_mask import TokenMask
from batchgen.strategies.counts import NUM_FORWARDS
from batchgen.strategies.dllm.rules.entropy_bound import EntropyBound
from batchgen.strategies.dllm.rules.joint_threshold import JointThreshold
from batchgen.strategies.dllm.rules.low_confidence_dynamic import LowConfidenceDynamic
from batchgen.strategies.dllm.rules.low_confidence_static import LowConfidenceStatic
from batchgen.strategies.dllm.rules.rule import Rule
from batchgen.strategies.dllm.rules.sequential import Sequential
from batchgen.strategies.dllm.strategy import DLLMStrategy

_FORCED = (1, 2, 4)
"""How many tokens a step unmasks under rules with a fixed number of steps."""
_THRESHOLDS: dict[str, Rule] = {
    "low_confidence_dynamic": LowConfidenceDynamic(confidence_threshold=0.6),
    "entropy_bound": EntropyBound(entropy_bound=0.5),
    "joint_threshold": JointThreshold(confidence_threshold=0.6, edit_threshold=0.9),
}
"""Rules with thresholds. `ChanceStrategy` draws what they compare with these."""


class ChanceStrategy(DLLMStrategy):
    """Block diffusion whose rules see random confidences and entropies, uniform in [0, 1], because
    those of random weights would never pass a threshold. The real ones are still computed."""

    def _draw(self, output: ModelOutput, mask: TokenMask | None) -> Drawn:
        drawn = super()._draw(output, mask)
        if drawn.confidence is not None:
            drawn = drawn._replace(confidence=torch.rand_like(drawn.confidence))
        if drawn.entropy is not None:
            drawn = drawn._replace(entropy=torch.rand_like(drawn.entropy))
        return drawn


def rules_of(block_length: int) -> dict[str, Rule]:
    """Name the rules that are timed, for blocks of this length."""
    forced = [count for count in _FORCED if block_length % count == 0]
    static = {
        f"low_confidence_static, {count} a step": LowConfidenceStatic(
            denoising_steps=block_length // count
        )
        for count in forced
    }
    return static | {"sequential, 1 a step": Sequential()} | _THRESHOLDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = [name for name, shape in MODELS.items() if "mask_token_id" in shape]
    parser.add_argument("--model", choices=shapes, default="sdar-8b")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="gsm8k")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--shared", type=int, default=800, help="tokens that prompts begin with")
    parser.add_argument("--in-flight", type=int, default=128, help="the most rows at once")
    parser.add_argument("--block-length", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=2, help="timed runs of each rule, in turn")
    parser.add_argument("--kv-cache-gib", type=float)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time one workload under each unmasking rule: the steps, and whole runs.

    Rules with a number of steps unmask 1, 2 or 4 tokens in each. Rules with thresholds see random
    confidences and entropies. All prompts begin with the same tokens, as those with worked examples
    do. Each rule runs once untimed. A step is a forward of as many rows as may be in flight, with
    the draw and the rule; "tokens a forward" counts tokens that the rows keep.
    """
    strategy, load = ChanceStrategy(options.block_length), WORKLOADS[options.workload]
    config = EngineConfig(
        max_num_seqs=options.in_flight,
        max_model_len=options.shared + load.input_lens[1] + load.output_lens[1] + 64,
        kv_cache_gib=options.kv_cache_gib,
    )
    timer = StepTimer(DEVICE)
    model = dummy_model(options.model, DEVICE)
    engine = LLMEngine(model, None, (), strategy, config, timer=timer)
    engine.capture_graphs()
    torch.manual_seed(0)
    rules, results = rules_of(options.block_length), list[dict[str, Any]]()
    for turn in range(1 + options.runs):
        for name, rule in rules.items():
            figures = _time(engine, timer, options, rule, turn)
            if turn:
                results.append({"rule": name, "model": options.model} | figures)
                print(_line(name, figures), flush=True)
    return results


def _time(
    engine: LLMEngine, timer: StepTimer, options: argparse.Namespace, rule: Rule, turn: int
) -> dict[str, Any]:
    """Run the workload once under a rule, and return its figures. Each turn has other prompts."""
    vocab = prompt_vocab(engine.vocab_size)
    shared = [(7 * place) % vocab for place in range(options.shared)]
    rows = []
    for seed, each in enumerate(requests(options.workload, vocab)[: options.requests]):
        params = RequestParams(
            temperature=options.temperature,
            max_new_tokens=each.output_len,
            ignore_eos=True,
            seed=seed,
            decoding=rule,
        )
        prompt = [(token + turn) % vocab for token in each.prompt]  # not in the prefix cache
        rows.append((shared + prompt, params))
    timer.reset()
    seconds, outputs = run_rows(engine, rows)
    steps = timer.steps()
    tokens = sum(len(output.token_ids) for output in outputs)
    forwards = sum(output.counts[NUM_FORWARDS.name] for output in outputs)
    full, others = full_batch(steps), [step for step in steps if step.kind != "decode"]
    return {
        "seconds": seconds,
        "output_tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "tokens_per_forward": tokens / forwards,
        "step_rows": full.rows // max(full.steps, 1),
        "step_ms": 1e3 * full.seconds / max(full.steps, 1),
        "idle_ms": 1e3 * full.idle_before / max(full.steps, 1),
        "full_batch": asdict(full),
        "prefill_and_mixed": asdict(PhaseSplit.of(others)),
    }


def _line(name: str, figures: dict[str, Any]) -> str:
    return (
        f"{name}: {{step_ms:.2f}} ms a step of {{step_rows}} rows (idle before {{idle_ms:.2f}}), "
        "{tokens_per_forward:.2f} tokens a forward, {seconds:.2f} s, {tokens_per_s:,.0f} tok/s"
    ).format(**figures)
