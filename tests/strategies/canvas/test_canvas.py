"""Canvases are denoised as transformers denoises them, with the same random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers.models.diffusion_gemma.generation_diffusion_gemma as theirs
from scipy import stats
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion

from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.execution.model_runner import ModelOutput
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.moe_model import ROUTED_EXPERTS
from batchgen.engine.rows.guide import Guide
from batchgen.engine.sampling.processed_logits import process
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.kernels.sampling.philox import Stream, gumbel_noise, philox, uniform_ids
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.canvas.renoising import Renoising, RenoisingRows
from batchgen.strategies.canvas.strategy import CanvasStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.support.engine.engine_rows import run

TinyModel = Callable[..., Path]
LENGTH, VOCAB, CPU = 8, 128, torch.device("cpu")
PROMPT = [(7 * i + 3) % VOCAB for i in range(45)]
"""Longer than the window of 24 tokens."""
SAMPLED = RequestParams(
    max_new_tokens=20, seed=5, temperature=1.0, ignore_eos=True, logprobs=True,
    logprobs_mode="processed", columns=("step_map", "entropy"),
)  # fmt: skip
RULES = (
    Renoising(max_denoising_steps=5, entropy_bound=6.0, stop_entropy=0.0),
    Renoising(
        max_denoising_steps=20, entropy_bound=1e9, stop_entropy=9.0, start_temperature=0.04,
        end_temperature=0.02,
    ),
    Renoising(
        max_denoising_steps=6, stable_steps=0, stop_entropy=4.4, start_temperature=0.6,
        end_temperature=0.02,
    ),
    Renoising(
        max_denoising_steps=20, entropy_bound=1e9, stop_entropy=9.0, start_temperature=0.04,
        end_temperature=0.02, stable_steps=2,
    ),
)  # fmt: skip
"""Without an early end, and with one that waits for the same answer in two steps, for a small
entropy alone, and for the same answer in three steps."""


class Watched(CanvasStrategy):
    """Keeps what each step made of the logits of the only row."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def decide(self, output: ModelOutput, guide: Guide | None) -> StepOutput:
        if not self.step_inputs.idle.any():
            sampling = self.step_inputs.sampled
            self.seen.append(process(output.logits, sampling, output.positions).clone())
        return super().decide(output, guide)


class Draws:
    """Our random numbers, in the places where transformers' `generate` draws its own."""

    def __init__(self, start: int, params: RequestParams) -> None:
        self.start, self.params, self.canvas, self.draw = start, params, -1, 0
        self.logits: list[Tensor] = []
        self.answers: list[Tensor] = []

    @property
    def keys(self) -> tuple[Tensor, Tensor]:
        places = self.start + self.canvas * LENGTH + torch.arange(LENGTH)
        return torch.full((LENGTH,), self.params.seed), places

    def noise(self, sampler: Any, batch_size: int, device: Any) -> Tensor:
        draws = torch.full((LENGTH,), self.draw)
        return uniform_ids(*self.keys, draws, Stream.RENOISE, VOCAB).unsqueeze(0)

    def multinomial(self, probs: Tensor, num_samples: int) -> Tensor:
        words = philox(*self.keys, self.draw, Stream.SAMPLE, VOCAB)
        self.draw += 1
        noise = 0.0 if self.params.greedy else gumbel_noise(words)
        return (probs.log() + noise).argmax(-1, keepdim=True)

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        mixin = theirs.DiffusionGemmaGenerationMixin
        prepare, step = mixin._prepare_denoiser_inputs, mixin._denoising_step

        def prepared(model: Any, **given: Any) -> Any:
            self.canvas, self.draw = self.canvas + 1, 0
            return prepare(model, **given)

        def stepped(model: Any, **given: Any) -> Any:
            found = step(model, **given)
            self.answers.append(found[1][0])
            self.logits.append(found[2][0])
            return found

        patch.setattr(mixin, "_prepare_denoiser_inputs", prepared)
        patch.setattr(mixin, "_denoising_step", stepped)
        patch.setattr(
            theirs.EntropyBoundSampler, "initialize_canvas", lambda *a, **k: self.noise(*a, **k)
        )
        patch.setattr(torch, "multinomial", self.multinomial)


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel) -> Path:
    # Larger weights make larger rounding errors, of transformers as well.
    return tiny_model("diffusion_gemma", initializer_range=0.04)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, attn_implementation="eager")
    return model.eval()


def make_engine(folder: Path, strategy: Strategy | None = None, **config: Any) -> LLMEngine:
    model = load_model(folder, device=CPU, dtype=torch.float32)
    values: dict[str, Any] = {"max_model_len": 128, "kv_cache_gib": 0.01, "max_num_seqs": 4}
    columns = config.pop("context_columns", ())
    settings = EngineConfig(**values | config)
    chosen = strategy or CanvasStrategy()
    return LLMEngine(model, None, (), chosen, settings, context_columns=columns)


@pytest.mark.quick(2, thorough=2)
@pytest.mark.parametrize(
    ("rule", "size", "greedy"),
    [(0, 45, False), (1, 5, False), (2, 23, False), (3, 45, True), (0, 30, True), (3, 45, False)],
)
def test_rows_are_those_of_transformers(
    folder: Path,
    reference: Any,
    monkeypatch: pytest.MonkeyPatch,
    rule: int,
    size: int,
    greedy: bool,
) -> None:
    """Tokens, the distributions of every step, and how many steps three canvases take."""
    options, prompt = RULES[rule], PROMPT[:size]
    params = replace(SAMPLED, decoding=options, temperature=0.0 if greedy else 1.0)
    strategy = Watched()
    (row,) = run(make_engine(folder, strategy, max_batched_tokens=16), [(prompt, params)])
    draws = Draws(size, params)
    with monkeypatch.context() as patch:
        draws.patch(patch)
        found = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=params.max_new_tokens,
            max_denoising_steps=options.max_denoising_steps,
            sampler_config=theirs.EntropyBoundSamplerConfig(float(options.entropy_bound)),
            t_min=options.end_temperature,
            t_max=options.start_temperature,
            stability_threshold=options.stable_steps,
            confidence_threshold=options.stop_entropy or 1e-30,
        )
    answer = found.sequences[0, size:].tolist()
    assert len(answer) == 24 and list(row.token_ids) == answer[:20]
    assert row.counts["num_forwards"] == len(draws.logits) == len(strategy.seen)
    # A low temperature makes rounding errors as much larger as logits.
    error = 1e-5 if rule == 0 else 2e-5 / options.end_temperature
    for ours, expected in zip(strategy.seen, draws.logits, strict=True):
        logprobs = ours.log_softmax(-1), expected.log_softmax(-1)
        torch.testing.assert_close(*logprobs, atol=error, rtol=0)
    # Each token's step is the last that changed the answer there, and its columns are of that step.
    step_map = row.columns["step_map"]
    for place in range(20):
        seen = [answers[place % LENGTH] for answers in draws.answers]
        number = int(step_map[place]) - 1
        assert seen[number] == answer[place]
        probs = draws.logits[number][place % LENGTH].log_softmax(-1)
        expected_entropy = float(torch.special.entr(probs.exp()).sum())
        np.testing.assert_allclose(row.columns["logprobs"][place], probs[answer[place]], atol=error)
        np.testing.assert_allclose(row.columns["entropy"][place], expected_entropy, atol=10 * error)


def test_early_ends_are_among_them(folder: Path) -> None:
    """Else no rule above would show when a canvas is finished."""
    steps = []
    for rule in RULES:
        strategy = CanvasStrategy()
        run(make_engine(folder, strategy), [(PROMPT, replace(SAMPLED, decoding=rule))])
        steps.append(set(strategy.stats()["steps_per_canvas"]))
    first, *others = zip(steps, (rule.max_denoising_steps for rule in RULES), strict=True)
    assert first[0] == {first[1]}
    assert all(1 < min(found) < end for found, end in others), steps


def test_what_stays_is_what_transformers_accepts() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = (
        torch.randn((6, LENGTH, VOCAB), generator=generator)
        * torch.linspace(1, 30, 6)[:, None, None]
    )
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    for bound in (0.1, 1.0, 6.0):
        rule = Renoising(entropy_bound=bound, stop_entropy=1.0, max_denoising_steps=3)
        config = theirs.EntropyBoundSamplerConfig(bound)
        sampler: Any = theirs.EntropyBoundSampler(config, LENGTH, VOCAB, 3)
        ones, zeros = torch.ones((6, LENGTH)).long(), torch.zeros((6, LENGTH)).long()
        expected = sampler.accept_canvas(zeros, ones, logits, 1)
        rows = RenoisingRows.build([rule] * 6, CPU)
        assert torch.equal(rows.accepted(entropies).long(), expected)
        criteria: Any = theirs.StableAndConfidentStoppingCriteria(1, 1.0)
        criteria(zeros, logits)
        ends = criteria(zeros, logits)
        steps = torch.full((6,), 2)
        assert torch.equal(rows.are_finished(entropies, torch.ones(6).long(), steps), ends)
        assert 0 < ends.sum() < 6 and rows.are_finished(entropies, steps, steps + 1).all()
    schedule: Any = theirs.LinearTemperatureScheduleLogitsProcessor(0.4, 0.8, 48)
    rows = RenoisingRows.build([Renoising()], CPU)
    for done in (0, 1, 47):
        scaled = schedule(None, torch.ones(1), cur_step=torch.tensor(48 - done))
        torch.testing.assert_close(1 / scaled, rows.temperatures(torch.tensor([done])))


def test_noise_is_uniform_and_differs_from_step_to_step() -> None:
    seeds, positions = torch.arange(40_000), torch.arange(40_000) % 512
    first, second = (
        uniform_ids(seeds, positions, torch.full((40_000,), draw), Stream.RENOISE, 97)
        for draw in (0, 1)
    )
    for ids in (first, second):
        assert stats.chisquare(torch.bincount(ids, minlength=97).numpy()).pvalue > 1e-3
    table = torch.bincount(first % 10 * 10 + second % 10, minlength=100).view(10, 10)
    assert stats.chi2_contingency(table.numpy()).pvalue > 1e-3


def test_the_experts_of_an_answer_are_those_of_a_prompt(folder: Path) -> None:
    """A final canvas is read as context is: what is recorded then stays."""
    engine = make_engine(folder, context_columns=(ROUTED_EXPERTS,), prefix_caching=False)
    params = replace(SAMPLED, decoding=RULES[0], max_new_tokens=16, columns=(ROUTED_EXPERTS,))
    (row,) = run(engine, [(PROMPT[:9], params)])
    (again,) = run(engine, [([*PROMPT[:9], *row.token_ids], params)])
    count = len(row.columns[ROUTED_EXPERTS])
    assert count >= 9 + 15
    np.testing.assert_array_equal(
        row.columns[ROUTED_EXPERTS], again.columns[ROUTED_EXPERTS][:count]
    )


def test_rows_end_at_stops_and_begin_again(folder: Path) -> None:
    """A row that goes on from what it has, and one that ends inside a canvas."""
    engine = make_engine(folder)
    rows = [(PROMPT[: 5 + 9 * i], replace(SAMPLED, seed=i, decoding=RULES[i])) for i in range(4)]
    whole = run(engine, rows)
    again = run(engine, rows, restarts=(4, 9))
    assert [row.token_ids for row in again] == [row.token_ids for row in whole]
    stop = whole[0].token_ids[10]
    (cut,) = run(engine, [(rows[0][0], replace(rows[0][1], stop_token_ids=(stop,)))])
    first = whole[0].token_ids.index(stop)
    assert list(cut.token_ids) == list(whole[0].token_ids[: first + 1])
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"constraint": Constraint("regex", "a*")}, "a constraint"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_what_cannot_be_honoured(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CanvasStrategy().check(replace(RequestParams(), **asked))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_denoising_steps": 0}, "max_denoising_steps must be a whole number from 1 on"),
        ({"entropy_bound": -1}, "entropy_bound must be a number from 0"),
        ({"end_temperature": 0}, "end_temperature must be a number"),
        ({"stable_steps": 1.5}, "stable_steps must be a whole number"),
        ({"stop_entropy": float("nan")}, "stop_entropy must be a number"),
        ({"unmasking": "sequential"}, "'unmasking' is no option of strategy canvas"),
    ],
)
def test_options_out_of_range(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CanvasStrategy.decoding_of_row(option)


def test_models_of_other_strategies(folder: Path, tiny_model: TinyModel) -> None:
    canvas, masks, plain = (
        load_model_config(each) for each in (folder, tiny_model("sdar"), tiny_model("qwen3"))
    )
    with pytest.raises(ValueError, match="fills in masks: use strategy=dllm"):
        CanvasStrategy().block_length(masks)
    with pytest.raises(ValueError, match="predicts next tokens: use strategy=ar"):
        CanvasStrategy().block_length(plain)
    with pytest.raises(ValueError, match="use strategy=canvas"):
        ARStrategy().block_length(canvas)
    with pytest.raises(ValueError, match="use strategy=canvas"):
        DLLMStrategy().block_length(canvas)
    with pytest.raises(ValueError, match="less than one canvas of 8 tokens"):
        CanvasStrategy().model_len(7, canvas)
    assert CanvasStrategy().model_len(64, canvas) == 57
