"""Enqueues steps on the device: a decode step, a prefill, or both in one forward.

`LLMEngine` passes each batch of the scheduler to `StepLauncher.launch`. It makes the inputs of the
batch's rows, launches the model's forward, and lets the strategy decide the new tokens on the
device. The host does not wait for any of this.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from batchgen.engine.device.step_timing import StepTimer, timed
from batchgen.engine.device.transfer import upload
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner, PrefillInputs
from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.rows.scheduled_batch import (
    DecodeBatch,
    MixedBatch,
    PrefillBatch,
    ScheduledBatch,
    StateBatch,
)
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.scheduling.adapter_slots import AdapterSlots
from batchgen.engine.scheduling.image_store import ImageStore
from batchgen.engine.scheduling.prefill_inputs import (
    block_tables,
    lora_slots,
    prefill_inputs,
    rope_shifts,
    state_slots,
    window_tables,
)
from batchgen.engine.state_reader import StateReader, sampling_inputs
from batchgen.engine.step_inputs import JoiningRows
from batchgen.engine.strategy import Strategy
from batchgen.kernels.rules import BY_BATCH, BitRules

Launched = tuple[PrefillBatch | DecodeBatch | StateBatch, StepOutput]
"""A batch, or the part of a mixed batch, that yields tokens, scores or pooled values, and its
results on the device."""


class StepLauncher:
    """Enqueues the steps of one strategy without waiting for the device.

    Args:
        runner: the runner of the target.
        score_rows: the most hidden states that are scored or pooled at once.
        timer: measures the steps; None measures nothing.
        images: encodes the images of prompts; None if the model reads none.
        adapters: chooses the adapters in the model's slots; None if the model has no adapters.
        windows: whether some model has layers with a sliding window.
        rules: what the bits of a row may depend on.
    """

    def __init__(
        self,
        strategy: Strategy,
        runner: ModelRunner,
        score_rows: int,
        timer: StepTimer | None,
        images: ImageStore | None = None,
        adapters: AdapterSlots | None = None,
        *,
        windows: bool = False,
        rules: BitRules = BY_BATCH,
    ) -> None:
        self._strategy, self._runner, self.timer = strategy, runner, timer
        self._images, self._windows, self._replay = images, windows, rules.replay
        self._adapters = adapters
        self._states = StateReader(runner, score_rows)

    def launch(self, batch: ScheduledBatch, catch_up: Callable[[], None]) -> list[Launched]:
        """Enqueue a step on the device.

        Args:
            catch_up: reads the results of all earlier launched steps. It is called before masks are
                made, because these depend on the newest tokens; meanwhile the device runs the
                current step's forward, or earlier work.

        Returns:
            The parts of the batch that yield tokens, scores or pooled values, each with its
                results.
        """
        if self._adapters is not None:
            self._load_adapters(self._adapters)
        if isinstance(batch, DecodeBatch):
            with timed(self.timer, "decode", batch.num_rows):
                step, _ = self._decode(batch, None, catch_up)
                return [(batch, step)]
        prefill = batch.prefill if isinstance(batch, MixedBatch) else batch
        inputs = self._prefill_inputs(prefill)
        if isinstance(batch, PrefillBatch):
            with timed(self.timer, "prefill", len(batch.seqs)):
                inputs, output = self._with_images(inputs, batch), None
                if inputs is not None:  # None: the prefix cache held all tokens of the batch
                    output = self._runner.prefill(inputs)
                return [*self._states.read(batch, output), *self._join(batch, inputs, output)]
        decode = batch.decode
        with timed(self.timer, "mixed", decode.num_rows + len(prefill.seqs)):
            inputs = self._with_images(inputs, prefill)
            step, prefilled = self._decode(decode, inputs, catch_up)
            states = self._states.read(prefill, prefilled)
            return [(decode, step), *states, *self._join(prefill, inputs, prefilled)]

    def _load_adapters(self, adapters: AdapterSlots) -> None:
        """Load the adapters that the scheduler has assigned to slots. No row of an earlier step
        uses the old adapters of these slots any more."""
        lora = self._runner.model.lora
        assert lora is not None
        for slot, adapter in adapters.take_loads():
            lora.load(slot, adapter)

    def _decode(
        self, batch: DecodeBatch, prefill: PrefillInputs | None, catch_up: Callable[[], None]
    ) -> tuple[StepOutput, ModelOutput | None]:
        """Enqueue a decode step, in one forward with `prefill` if there is one."""
        self._strategy.step_inputs.reindex(batch)
        if batch.guide is not None and self._strategy.proposes_from_guide:
            catch_up()
        self._strategy.propose(batch)
        decoded, prefilled = self._strategy.forward(self._runner, prefill)
        if batch.guide is not None:
            catch_up()
        return self._advance(batch, decoded), prefilled

    def _advance(self, batch: DecodeBatch, output: ModelOutput) -> StepOutput:
        """Let the strategy decide the rows' tokens on the device, and prepare the next step's
        inputs."""
        step = self._strategy.decide(output, batch.guide)
        step_inputs, states = self._strategy.step_inputs, self._runner.states
        if states is not None:
            assert step_inputs.state_slots is not None
            states.advance(step_inputs.state_slots, step.num_tokens)
        step_inputs.step_decode(step)
        return step

    def _steps_from(self, seq: Sequence) -> int:
        """Return how many of the row's first tokens a prefill computes in its own way.

        The tokens after these are computed as decode steps compute them, so that an answer that is
        scored gets the bits it had when it was generated. On a GPU this is slow, so it is done only
        if the engine's rules demand it.
        """
        if self._replay or self._runner.device.type == "cpu":
            multiple = self._strategy.prefill_multiple
            return seq.answer_start // multiple * multiple
        return seq.num_prompt_tokens

    def _prefill_inputs(self, batch: PrefillBatch) -> PrefillInputs | None:
        """Make the inputs of a prefill's forward, and restore the recurrent states that its rows
        start from. Returns None if no token has to be computed."""
        seqs, states, device = batch.seqs, self._runner.states, self._runner.device
        steps_from = self._steps_from if states is not None or self._replay else None
        if states is not None:
            restored = [seq for seq in seqs if seq.restore_from is not None]
            if restored:
                sources = np.array([seq.restore_from for seq in restored], np.int64)
                states.copy(sources, np.array([seq.state_slot for seq in restored], np.int64))
                for seq in restored:
                    seq.restore_from = None
            # Earlier chunks of the rows have replayed this many tokens (`RowStates.begin`).
            assert steps_from is not None
            num_replayed = [max(seq.num_computed_tokens - steps_from(seq), 0) for seq in seqs]
            slots = [seq.state_slot for seq in seqs]
            states.begin(
                upload(slots, torch.int64, device), upload(num_replayed, torch.int32, device)
            )
        hidden = self._strategy.needs_hidden
        lora = self._runner.model.lora is not None
        return prefill_inputs(
            batch, device, states is not None, hidden, self._windows, lora, steps_from
        )

    def _with_images(
        self, inputs: PrefillInputs | None, batch: PrefillBatch
    ) -> PrefillInputs | None:
        """Encode the images whose first tokens the prefill reads. Returns the inputs with the
        features of all image tokens among them."""
        images = self._images
        if inputs is None or images is None or not any(seq.spans for seq in batch.seqs):
            return inputs
        images.encode()
        features = images.features(batch)
        for seq in batch.seqs:
            images.drop(seq, seq.num_computed_tokens)
        return inputs._replace(images=features)

    def _join(
        self, batch: PrefillBatch, prefill: PrefillInputs | None, output: ModelOutput | None
    ) -> list[Launched]:
        """Report a prefill to the strategy, and add the rows that it completes to the decoding
        rows.

        The strategy decides the first token of each row whose prefill yields one. Returns the batch
        with these tokens, or an empty list if no row's prefill yields a token.

        Args:
            prefill: the inputs of the prefill's forward; None if no token had to be computed.
            output: the output of the forward; None likewise.
        """
        step_inputs, device = self._strategy.step_inputs, self._runner.device
        if batch.completing and batch.keep is not None:
            step_inputs.keep_rows(batch.keep)
        seqs = [batch.seqs[i] for i in batch.completing]
        rows = self._joining_rows(seqs) if seqs else None
        newest = upload([seq.token_ids[-1] for seq in seqs], torch.int64, device)
        yielding = np.flatnonzero([seq.prefill_yields for seq in seqs])
        step = None
        if len(yielding):
            assert rows is not None and output is not None
            if len(yielding) == len(seqs):
                step = self._strategy.first_tokens(output, rows)
                newest = step.token_ids[:, 0]
            else:
                step = self._strategy.first_tokens(output, rows.index_select(yielding))
                newest[upload(yielding, torch.int64, device)] = step.token_ids[:, 0]
        if prefill is not None:
            assert output is not None
            hidden = output.hidden if self._strategy.needs_hidden else None
            self._strategy.prefilled(batch, prefill.inputs, hidden, newest)
        if rows is not None:
            step_inputs.merge_prefill(rows, newest)
        return [] if step is None else [(batch, step)]

    def _joining_rows(self, seqs: list[Sequence]) -> JoiningRows:
        """Collect what the StepInputs need of rows whose prefill is complete."""
        device = self._runner.device
        return JoiningRows(
            tuple(seqs),
            upload(block_tables(seqs), torch.int64, device),
            np.array([seq.num_prefill_tokens for seq in seqs], np.int64),
            sampling_inputs(seqs, device),
            None if self._runner.states is None else state_slots(seqs, device),
            rope_shifts(seqs, device) if self._runner.model.turns_apart else None,
            window_tables=upload(window_tables(seqs), torch.int64, device)
            if self._windows
            else None,
            lora_slots=None if self._runner.model.lora is None else lora_slots(seqs, device),
        )
