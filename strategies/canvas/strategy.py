"""The strategy `canvas`: diffusion over canvases without masks (DiffusionGemma, Google 2026). All
tokens of a canvas are denoised together, starting from random ones. The engine calls the methods of
`Strategy`, where those without a docstring here are described."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner, PrefillInputs
from batchgen.engine.interface.outputs import HostOutput, OutputColumn, RowCount, StepOutput
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.rows.guide import Guide
from batchgen.engine.rows.scheduled_batch import DecodeBatch
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.sampling.logits import Logits
from batchgen.engine.sampling.processed_logits import process
from batchgen.engine.sampling.sampler import draw_tokens, take_tokens
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.scheduling.admission import Ints
from batchgen.engine.strategy import TARGET, ModelRole, Strategy
from batchgen.strategies.blocks import STEP_MAP
from batchgen.strategies.canvas.renoising import Renoising
from batchgen.strategies.canvas.step_inputs import CanvasStepInputs
from batchgen.strategies.counts import NUM_FORWARDS, tokens_per_forward

_DENOISED = "denoised"
"""The name in `StepOutput.observed` of the number of steps of each final canvas."""
_WAITING = "waiting"
"""The name in `StepOutput.observed` of the rows whose canvases wait to become part of the
context."""
_STEPS_PER_CANVAS = "steps_per_canvas"
"""The name in `stats` of how often a canvas took each number of steps."""


class CanvasStrategy(Strategy):
    """Denoises a canvas after the known tokens of a row, then computes its answer as context, and
    continues with the next canvas.

    A canvas is *waiting* once it is denoised: its answer becomes context in a later step, whose
    forward writes its KV cache. That step yields the answer's tokens.

    The arguments are those of `Renoising`, which rows may override (`RequestParams.decoding`).
    Raises ValueError if one is out of range.
    """

    name = "canvas"
    columns: tuple[OutputColumn, ...] = (STEP_MAP,)
    counts: tuple[RowCount, ...] = (NUM_FORWARDS,)
    decoding = Renoising

    @classmethod
    def decoding_of_row(cls, values: Mapping[str, Any]) -> object:
        return Renoising.of_row(values)

    def __init__(
        self,
        max_denoising_steps: int = 48,
        entropy_bound: float = 0.1,
        start_temperature: float = 0.8,
        end_temperature: float = 0.4,
        stable_steps: int = 1,
        stop_entropy: float = 0.005,
    ) -> None:
        self._rule = Renoising(
            max_denoising_steps=max_denoising_steps,
            entropy_bound=entropy_bound,
            start_temperature=start_temperature,
            end_temperature=end_temperature,
            stable_steps=stable_steps,
            stop_entropy=stop_entropy,
        )
        self._length = 0
        self._runner: ModelRunner | None = None
        self._step_inputs: CanvasStepInputs | None = None
        self._waiting = 0
        self._steps_per_canvas: Counter[int] = Counter()

    @property
    def step_inputs(self) -> CanvasStepInputs:
        assert self._step_inputs is not None, "attach comes first"
        return self._step_inputs

    def block_length(self, model: ModelConfig) -> int:
        """Check the model and set the canvas length. The context is read causally, so the result is
        1."""
        if model.canvas_length is None:
            what = "predicts next tokens" if model.diffusion is None else "fills in masks"
            raise ValueError(
                "strategy canvas needs a model that denoises canvases of random tokens, and "
                f"{model.architecture} {what}: use strategy="
                f"{'ar' if model.diffusion is None else 'dllm'}"
            )
        self._length = model.canvas_length
        return 1

    @property
    def models(self) -> Mapping[str, ModelRole]:
        return {TARGET: ModelRole((self._length,), forward_rows=2)}

    def model_len(self, longest: int, model: ModelConfig) -> int:
        """Leave room for the rest of a row's last canvas, which is denoised as a whole even if the
        row ends at its first position."""
        self.block_length(model)
        if longest < self._length:
            raise ValueError(
                f"max_model_len is {longest}, less than one canvas of {self._length} tokens: "
                "raise it"
            )
        return longest - self._length + 1

    @property
    def least_tokens(self) -> int:
        return 0

    def step_width(self, num_rows: int) -> int:
        return self._length

    def prefill_of(self, seq: Sequence) -> tuple[int, bool]:
        """Let the prefill read all known tokens and yield none."""
        return seq.num_tokens, False

    def cache_tokens(self, num_tokens: Ints, pending: Ints, width: int, max_tokens: Ints) -> Ints:
        """Reserve room for a canvas that becomes context, and for the next one."""
        end = num_tokens + pending + 2 * self._length
        tokens: Ints = np.minimum(end, self.most_cache_tokens(max_tokens))
        return tokens

    def most_cache_tokens(self, max_tokens: Ints) -> Ints:
        return max_tokens + self._length - 1

    def check(self, params: RequestParams, *, replays: bool = False) -> None:
        """Refuse options that need a left-to-right order or an unmasking order."""
        super().check(params, replays=replays)
        reason = "denoises all tokens of a canvas at once"
        refused = {
            "a constraint": params.constraint is not None,
            "repetition_penalty, presence_penalty or frequency_penalty": params.has_penalties,
            "the score of a given answer (max_new_tokens 0)": params.scores_answer,
            "embedding, class_scores or hidden_states of a prompt": params.pooling is not None,
        }
        for what, is_asked in refused.items():
            if is_asked:
                raise ValueError(
                    f"strategy canvas {reason}, and cannot honour {what}: leave that out, or use a "
                    "model that predicts next tokens, with strategy=ar"
                )

    def attach(self, runners: Mapping[str, ModelRunner]) -> None:
        self._runner = runner = runners[TARGET]
        self._step_inputs = CanvasStepInputs(self._length, runner.model, self._rule)

    def propose(self, batch: DecodeBatch) -> None:
        """Let waiting canvases become part of the context.

        On a CPU these are all that wait. On a GPU the host must not wait for the device, so their
        number is that of the newest step whose results have arrived.
        """
        assert self._runner is not None
        state, waiting = self.step_inputs, self._waiting
        if self._runner.device.type == "cpu":
            waiting = int(state.waiting.sum())
        state.commit(min(waiting, batch.num_rows))

    def forward(
        self, runner: ModelRunner, prefill: PrefillInputs | None
    ) -> tuple[ModelOutput, ModelOutput | None]:
        """Run the forward, and compute logits only for the canvases."""
        assert prefill is None, "prompts are read beside rows of one token only"
        state = self.step_inputs
        hidden = runner.canvas_states(state.model_inputs, state.context)
        logits = runner.compute_logits(hidden)
        return ModelOutput(Logits(logits, logits.shape[1]), state.positions.flatten(), hidden), None

    def decide(self, output: ModelOutput, guide: Guide | None) -> StepOutput:
        """Denoise all canvases by one step, and return the answers that became context in this
        step: a canvas of L tokens for such a row, and no tokens for the other rows."""
        assert guide is None, "check refuses constraints"
        # `_denoise` changes which rows are idle, and how many steps their canvases have had.
        active, num_steps = ~self.step_inputs.idle, self.step_inputs.canvases.denoised + 1
        failed = self._denoise(output) & active
        return self._committed(failed, num_steps)

    def _denoise(self, output: ModelOutput) -> Tensor:
        """Draw tokens for all positions and write them to the canvases that are not idle. Return
        the rows whose logits have NaN or infinity, [B] bool."""
        state = self.step_inputs
        shape = state.canvases.token_ids.shape  # [B, L]
        logits, sampling, positions = output.logits, state.sampled, output.positions
        drawn = draw_tokens(logits, sampling, positions, state.draws, entropy=True)
        assert drawn.entropy is not None
        # A canvas's answer are the likeliest tokens of the last step. Columns describe them.
        processed = process(logits, sampling, positions)
        answers = processed.argmax(-1)
        columns = take_tokens(logits, sampling, positions, answers).columns
        steps = (state.canvases.steps + 1).unsqueeze(1).expand(shape).contiguous()
        state.write(
            drawn.token_ids.view(shape),
            answers.view(shape),
            drawn.entropy.view(shape),
            self._signals(processed),
            {STEP_MAP.name: steps}
            | {name: values.view(*shape, *values.shape[1:]) for name, values in columns.items()},
        )
        return drawn.failed.view(shape).any(1)

    def _signals(self, processed: Tensor) -> Tensor:
        """Return what the next step is conditioned on, [B, L, hidden_size]: the mean embeddings
        under the distributions of processed logits [B · L, vocab_size]. They are multiplied row by
        row, so that the bits of a row do not depend on the others."""
        assert self._runner is not None
        mean = self._runner.model.mean_embeddings
        return torch.stack([mean(canvas) for canvas in processed.split(self._length)])

    def _committed(self, failed: Tensor, num_steps: Tensor) -> StepOutput:
        """Return the output of the step: the answers that became context in it.

        Args:
            failed: [B] bool, the rows that end with an error.
            num_steps: [B] int64, the steps of each row's canvas, this one included.
        """
        state, final = self.step_inputs, self.step_inputs.final
        assert final is not None, "propose comes first"
        # The forwards of a canvas are counted when it becomes context, or when its row fails.
        forwards = torch.where(final.rows, final.denoised, 0)
        forwards += torch.where(failed, num_steps, 0)
        step = StepOutput(
            num_tokens=torch.where(final.rows, self._length, 0).int(),
            token_ids=final.token_ids,
            failed=failed,
            columns=final.columns,
            observed={_DENOISED: final.denoised, _WAITING: state.waiting},
            unread_tokens=0,
        )
        return step.with_counts(**{NUM_FORWARDS.name: forwards.int()})

    def observe(self, step: HostOutput, current: npt.NDArray[np.bool_]) -> None:
        """Learn how many canvases wait, and count the steps of the final ones."""
        self._waiting = int(step.observed[_WAITING].sum())
        final = (step.num_tokens > 0) & current
        self._steps_per_canvas.update(step.observed[_DENOISED][final].tolist())

    def stats(self) -> Mapping[str, Any]:
        """Return `steps_per_canvas`: maps a number of denoise steps to the number of canvases that
        took as many."""
        return {_STEPS_PER_CANVAS: dict(sorted(self._steps_per_canvas.items()))}

    def summary(
        self, counts: Mapping[str, int], stats: Mapping[str, Any], num_tokens: int
    ) -> list[tuple[str, str]]:
        lines = tokens_per_forward(counts, num_tokens)
        if stats and (numbers := stats[_STEPS_PER_CANVAS]):
            total = sum(numbers.values())
            mean = sum(int(n) * count for n, count in numbers.items()) / total
            lines.append(("steps per canvas", f"{mean:.1f} of {total:,}"))
        return lines
