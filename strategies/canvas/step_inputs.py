"""The state of canvas diffusion between steps: each row has a canvas of random tokens, which is
denoised until its answer is stable and then becomes part of the context. `CanvasStrategy` owns
it. Methods without a docstring are those of `StepInputs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.device.batched import Batched, row
from batchgen.engine.device.transfer import upload
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.models.token_model import TokenModel
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.step_inputs import JoiningRows, StepInputs
from batchgen.kernels.sampling.philox import Stream, uniform_ids
from batchgen.strategies.blocks import commit_inputs, steps_so_far, widened
from batchgen.strategies.canvas.renoising import Renoising, RenoisingRows


@dataclass(frozen=True)
class CanvasRows(Batched):
    """The current canvas, of L positions, of each of B rows."""

    starts: Tensor = row()  # [B] int64, the position of the canvas's first token
    last_starts: Tensor = row()  # [B] int64, the same for the last canvas that the row can have
    token_ids: Tensor = row()  # [B, L] int64, the tokens that the next step reads
    answers: Tensor = row()  # [B, L] int64, the likeliest tokens of the last step; -1 at first
    signals: Tensor = row()  # [B, L, hidden_size], what the next step is conditioned on
    denoised: Tensor = row()  # [B] int64, how many steps the canvas has had
    unchanged: Tensor = row()  # [B] int64, for how many steps the answer has not changed
    steps: Tensor = row()  # [B] int32, how many steps the row has had
    finished: Tensor = row()  # [B] bool, whether the answer is final, but not in the context yet
    over: Tensor = row()  # [B] bool, whether the row's last canvas is part of the context


@dataclass(frozen=True)
class FinalCanvases:
    """The canvases of B rows, some of which become part of the context in the current forward."""

    rows: Tensor  # [B] bool, the rows whose canvas becomes part of the context
    token_ids: Tensor  # [B, L] int64
    denoised: Tensor  # [B] int64, how many steps the canvases took
    columns: Mapping[str, Tensor]  # name → [B, L, *tail]


class CanvasStepInputs(StepInputs):
    """The canvas of each row, and the columns of its answer.

    A finished canvas becomes part of the context in the same forward as the first step of the row's
    next canvas (`commit`), if there is room. Until then its row waits.

    Args:
        length: L, the number of positions of a canvas.
        model: the model that denoises the canvases.
        default: the options of rows that bring none.

    Attributes:
        columns: maps the name of an output column to [B, L, *tail], the values of the answers'
            tokens. Each value is from the last step that changed its token.
        final: the canvases that become part of the context in the current step.
        context: what the current forward reads of these canvases.
    """

    def __init__(self, length: int, model: TokenModel, default: Renoising) -> None:
        super().__init__()
        self._length, self._model, self._default = length, model, default
        self.columns: dict[str, Tensor] = {}
        self._canvases: CanvasRows | None = None
        self._rules: RenoisingRows | None = None
        self._repeated: SamplingInputs | None = None
        # The next two are of the current step.
        self.final: FinalCanvases | None = None
        self.context: ModelInputs | None = None

    @property
    def canvases(self) -> CanvasRows:
        """The current canvas of each row."""
        assert self._canvases is not None, "no row has joined yet"
        return self._canvases

    @property
    def rules(self) -> RenoisingRows:
        """The options of each row."""
        assert self._rules is not None, "no row has joined yet"
        return self._rules

    @property
    def positions(self) -> Tensor:
        """The absolute positions of each row's canvas, [B, L] int64."""
        offsets = torch.arange(self._length, device=self.canvases.starts.device)
        return self.canvases.starts.unsqueeze(1) + offsets

    @property
    def sampled(self) -> SamplingInputs:
        """The sampler's inputs for the L positions of each row in the current step."""
        if self._repeated is None:
            self._repeated = self.sampling.repeat(self._length)
        factors = self.rules.temperatures(self.canvases.denoised)
        return self._repeated.heated(factors.repeat_interleave(self._length))

    @property
    def draws(self) -> Tensor:
        """How many draws each position has had, [B · L] int64, which selects the random numbers."""
        return self.canvases.denoised.repeat_interleave(self._length)

    @property
    def idle(self) -> Tensor:
        """The rows that a step does not change, [B] bool."""
        return self.canvases.finished | self.canvases.over

    @property
    def waiting(self) -> Tensor:
        """The rows whose finished canvas is still to become part of the context, [B] bool."""
        return self.canvases.finished & ~self.canvases.over

    @property
    def model_inputs(self) -> ModelInputs:
        """The canvas of each row. Idle rows read and write scratch instead, because the same
        forward may write their context."""
        newest, idle = self.newest, self.idle.unsqueeze(1)
        windows = newest.window_tables
        return replace(
            newest,
            input_ids=self.canvases.token_ids.flatten(),
            positions=self.positions.masked_fill(idle, 0).flatten(),
            block_tables=newest.block_tables.masked_fill(idle, 0),
            window_tables=None if windows is None else windows.masked_fill(idle, 0),
            query_lens=np.full_like(newest.query_lens, self._length),
            hidden=self.canvases.signals.flatten(0, 1),
        )

    def commit(self, room: int) -> None:
        """Let up to `room` finished canvases become part of the context in the current forward.
        Their rows begin the next canvas."""
        canvases, waiting = self.canvases, self.waiting
        rank = waiting.cumsum(0)
        rows = waiting & (rank <= room)
        answers = canvases.answers.clamp(min=0)
        self.final = FinalCanvases(rows, answers, canvases.denoised, dict(self.columns))
        self.context = None
        if room:
            indices = torch.where(rows, rank - 1, room)
            self.context = commit_inputs(answers, self.positions, self.newest, indices, room)
        self._canvases = self._opened(rows)

    def _opened(self, rows: Tensor) -> CanvasRows:
        """Return the canvases after the rows `rows` [B] bool have begun their next canvas, or have
        ended because they cannot have another."""
        canvases = self.canvases
        more = rows & (canvases.starts < canvases.last_starts)
        starts = torch.where(more, canvases.starts + self._length, canvases.starts)
        opening = more.unsqueeze(1)
        zeros = canvases.denoised.masked_fill(more, 0)
        opened = replace(
            canvases,
            starts=starts,
            answers=canvases.answers.masked_fill(opening, -1),
            signals=canvases.signals.masked_fill(opening.unsqueeze(2), 0),
            denoised=zeros,
            unchanged=canvases.unchanged.masked_fill(more, 0),
            finished=canvases.finished & ~more,
            over=canvases.over | (rows & ~more),
        )
        noise = self._noise(self.sampling.seeds, starts, zeros)
        return replace(opened, token_ids=torch.where(opening, noise, canvases.token_ids))

    def _noise(self, seeds: Tensor, starts: Tensor, draws: Tensor) -> Tensor:
        """Return random tokens [B, L] for canvases that begin at `starts` [B] and have had `draws`
        [B] steps. They depend only on seed, position and step."""
        length = self._length
        positions = starts.unsqueeze(1) + torch.arange(length, device=starts.device)
        ids = uniform_ids(
            seeds.repeat_interleave(length),
            positions.flatten(),
            draws.repeat_interleave(length),
            Stream.RENOISE,
            self._model.vocab_size,
        )
        return ids.view(positions.shape)

    def merge_prefill(self, rows: JoiningRows, newest: Tensor) -> None:
        """Add B rows whose prefill has read all known tokens, each with a canvas of noise after
        these. Canvases do not depend on `newest` [B], the rows' newest tokens."""
        device, length = newest.device, self._length
        decodings = [seq.params.decoding for seq in rows.seqs]
        rules = [rule if isinstance(rule, Renoising) else self._default for rule in decodings]
        starts = rows.context_lens
        prompts = np.array([seq.num_prompt_tokens for seq in rows.seqs])
        longest = np.array([seq.max_tokens for seq in rows.seqs]) - prompts
        last = prompts + (longest - 1) // length * length
        steps = np.array([steps_so_far(seq) for seq in rows.seqs])
        numbers = upload(np.stack([starts, last, steps]), torch.int64, device)
        zeros = torch.zeros_like(numbers[0])
        noise = self._noise(rows.sampling.seeds, numbers[0], zeros)
        sizes = len(noise), length, self._model.hidden_size
        new = CanvasRows(
            starts=numbers[0],
            last_starts=numbers[1],
            token_ids=noise,
            answers=torch.full_like(noise, -1),
            signals=torch.zeros(sizes, dtype=self._model.dtype, device=device),
            denoised=zeros,
            unchanged=zeros,
            steps=numbers[2].int(),
            finished=zeros.bool(),
            over=zeros.bool(),
        )
        new_rules = RenoisingRows.build(rules, device)
        self._add_rows(rows, newest)
        self._repeated = None
        if self._canvases is None or self._rules is None:
            self._canvases, self._rules = new, new_rules
        else:
            self._canvases = CanvasRows.concat([self._canvases, new])
            self._rules = RenoisingRows.concat([self._rules, new_rules])
        for name, values in self.columns.items():
            added = values.new_zeros((len(noise), *values.shape[1:]))
            self.columns[name] = torch.cat((values, added))

    def keep_rows(self, keep: npt.NDArray[np.int64]) -> None:
        super().keep_rows(keep)
        self._canvases = self.canvases.index_select(keep) if len(keep) else None
        self._rules = self.rules.index_select(keep) if len(keep) else None
        self._repeated = None
        if len(keep) and self.columns:
            index = upload(keep, torch.int64, self.canvases.starts.device)
            self.columns = {name: values[index] for name, values in self.columns.items()}
        elif self.columns:
            self.columns = {}

    def write(
        self,
        token_ids: Tensor,
        answers: Tensor,
        entropies: Tensor,
        signals: Tensor,
        columns: Mapping[str, Tensor],
    ) -> None:
        """Update the canvases that are not idle with the results of a step.

        Args:
            token_ids: [B, L] int64, the drawn tokens.
            answers: [B, L] int64, the likeliest tokens.
            entropies: [B, L] float32, the entropies of the distributions that tokens were drawn
                from.
            signals: [B, L, hidden_size], what the next step is conditioned on.
            columns: maps the name of an output column to [B, L, *tail], the values of `answers`.
        """
        canvases, rules, active = self.canvases, self.rules, ~self.idle
        changed = (answers != canvases.answers) & active.unsqueeze(1)
        for name, values in columns.items():
            old = self.columns.get(name)
            if old is None or old.shape != values.shape:
                old = widened(old, values)
            mask = changed.view(*changed.shape, *[1] * (values.dim() - 2))
            self.columns[name] = torch.where(mask, values, old)
        denoised = canvases.denoised + active
        unchanged = torch.where(changed.any(1), 0, canvases.unchanged + active)
        noise = self._noise(self.sampling.seeds, canvases.starts, denoised)
        read = torch.where(rules.accepted(entropies), token_ids, noise)
        finished = rules.are_finished(entropies, unchanged, denoised) & active
        working = active.unsqueeze(1)
        self._canvases = replace(
            canvases,
            token_ids=torch.where(working, read, canvases.token_ids),
            answers=torch.where(working, answers, canvases.answers),
            signals=torch.where(working.unsqueeze(2), signals, canvases.signals),
            denoised=denoised,
            unchanged=unchanged,
            steps=canvases.steps + active.int(),
            finished=canvases.finished | finished,
        )

    def step_decode(self, step: StepOutput) -> None:
        """Drop the inputs of the current step's forward. `write` has already updated the
        canvases."""
        self.final = self.context = None
