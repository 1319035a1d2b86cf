"""Runs the forwards of one model over its caches: as CUDA graphs where a batch fits one, and kernel
by kernel otherwise.

`StepLauncher` and the strategies call `ModelRunner` in every step. A *row* is a sequence. Its known
tokens are read by *prefills*, and each new token by *decode steps*. One forward may have several
*parts*, such as a decode step of some rows and a prefill of others. Padding tokens are rows on
*scratch*: block 0 of the caches, which belongs to no row.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.engine.caches.forward_context import ImageFeatures, OutputTokens
from batchgen.engine.caches.model_caches import ModelCaches
from batchgen.engine.caches.row_states import RowStates
from batchgen.engine.device.transfer import upload
from batchgen.engine.execution.cuda_graph import ForwardGraphs
from batchgen.engine.execution.forward import Part, run_forward
from batchgen.engine.execution.graph_shapes import GraphShapes
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.models.token_model import TokenModel
from batchgen.engine.sampling.logits import Logits
from batchgen.kernels.attention.metadata import AttentionMetadata
from batchgen.kernels.attention.prefill_plan import tile_tokens
from batchgen.kernels.layers.linear import ROW_MULTIPLE
from batchgen.kernels.rules import BY_BATCH, BitRules


class ModelOutput(NamedTuple):
    """The results of a forward."""

    divided: Logits  # the logits of R of the T tokens; each rank has some of the columns
    positions: Tensor  # [R] int64, the absolute positions of these R tokens in their rows
    # [T, hidden_size], the hidden states of all tokens of the forward, valid until the next
    # forward; None if only those of the R tokens were computed.
    hidden: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """The logits of the R tokens, [R, vocab_size] in the model's dtype."""
        return self.divided.whole()


class PrefillInputs(NamedTuple):
    """The tokens that a prefill reads."""

    inputs: ModelInputs  # the tokens of B rows; each row has a chunk of its known tokens
    # [R] on the host, the indices of the rows whose last token yields logits.
    rows: npt.NDArray[np.int64]
    all_hidden: bool = False  # whether the hidden states of all tokens are needed
    images: ImageFeatures | None = None  # the image tokens; None if there are none


class ModelRunner:
    """Runs one model over its caches.

    Args:
        model: the model, on its device and in its dtype.
        block_length: the block length of block-causal attention, which is causal between blocks and
            full inside a block; 1 is ordinary causal attention. Above 1, a row's tokens in one
            forward must end at the end of a block or of the row, because tokens cannot attend to
            tokens of the same block in a later forward.
        rules: what the bits of a row may depend on.
    """

    def __init__(
        self,
        model: TokenModel,
        caches: ModelCaches,
        block_length: int = 1,
        rules: BitRules = BY_BATCH,
    ) -> None:
        self.model = model
        self.caches = caches
        # The graphs hold this function. It must not hold `self`, because `self` holds the graphs,
        # and the cycle would keep a dropped engine alive.
        self._forward = partial(run_forward, model, caches, block_length, rules)
        self._rules = rules
        self.device = model.device
        # A CPU's products pad their rows to this multiple; one padding per forward saves copies.
        self._token_multiple = ROW_MULTIPLE if self.device.type == "cpu" else 1
        self._graphs: ForwardGraphs | None = None

    @property
    def states(self) -> RowStates | None:
        """The states of the rows; None for a model without recurrent layers."""
        return self.caches.states

    def scratch_inputs(self, query_lens: npt.NDArray[np.int64], num_blocks: int = 1) -> ModelInputs:
        """Make rows on scratch that have every input the model reads. `query_lens` [B] is the
        number of tokens of each row."""
        hidden = None
        if self.model.reads_hidden:
            hidden = torch.zeros(
                (1, self.model.hidden_size), dtype=self.model.dtype, device=self.device
            )
        return ModelInputs.on_scratch(
            query_lens,
            num_blocks,
            self.device,
            states=self.states is not None,
            hidden=hidden,
            rope_shifts=self.model.turns_apart,
            windows=self.model.window is not None,
            lora=self.model.lora is not None,
        )

    @torch.inference_mode()
    def capture(self, shapes: GraphShapes) -> None:
        """Let batches of these shapes replay CUDA graphs. The largest sizes are captured now, the
        others while steps run."""
        self._graphs = self._make_graphs(shapes)
        self._graphs.capture()

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture the CUDA graphs of all shapes passed to `capture`, if it was called."""
        if self._graphs is not None:
            self._graphs.capture_all()

    @torch.inference_mode()
    def run_uncaptured(self, shapes: GraphShapes) -> None:
        """Run the forwards of the CUDA graphs of these shapes, without capturing any."""
        self._make_graphs(shapes).run_all()

    def _make_graphs(self, shapes: GraphShapes) -> ForwardGraphs:
        """Make the fixed inputs of CUDA graphs of these shapes, which are not captured yet."""
        tiles = {
            tile_tokens(shape.num_heads, shape.num_kv_heads, shape.head_dim, self.model.dtype)
            for shape in self.model.attention_shapes
        }
        model, features = self.model, None
        scratch = self.scratch_inputs(np.ones(1, np.int64))
        if model.turns_apart:
            axes = (1, 3) if model.turns_by_axes else (1,)
            scratch = replace(scratch, rope_positions=scratch.positions.new_zeros(axes))
        if model.tower is not None:
            sizes = model.tower.planes, 1, model.hidden_size
            features = torch.zeros(sizes, dtype=model.dtype, device=self.device)
        return ForwardGraphs(
            self._forward, shapes, self.caches.block_size, sorted(tiles), scratch, features
        )

    def drop_graphs(self) -> None:
        """Free the CUDA graphs. Later forwards run without graphs."""
        if self._graphs is not None:
            self._graphs.drop()
        self._graphs = None

    @torch.inference_mode()
    def prefill(self, prefill: PrefillInputs) -> ModelOutput:
        """Run a prefill, which fills the caches, and return the logits at the last tokens of R of
        its B rows."""
        inputs, rows = prefill.inputs, prefill.rows
        last = self._last_tokens(inputs, rows)
        positions = inputs.positions[last]
        slots = self._logit_slots(inputs, rows)
        if prefill.all_hidden:
            hidden = self._all_hidden(prefill)
            return ModelOutput(self._logits_of(hidden[last], slots), positions, hidden)
        return ModelOutput(self._logits_of(self.prefill_states(prefill), slots), positions)

    @torch.inference_mode()
    def prefill_states(self, prefill: PrefillInputs) -> Tensor:
        """Run a prefill, which fills the caches, and return the hidden states of the last tokens of
        R of its B rows, [R, hidden_size], valid until the next forward.

        The last layer computes only these tokens, unless a column of context scope is written: one
        in which layers record a value for every token.
        """
        inputs, rows = prefill.inputs, prefill.rows
        last = self._last_tokens(inputs, rows)
        if self.caches.columns:
            return self._all_hidden(prefill)[last]
        outputs = self._output_rows(inputs, last, rows)
        if self._graphs is not None and self._graphs.takes_prefill(inputs):
            return self._graphs.prefill(inputs, last, outputs, prefill.images)
        # The last layer computes at least one token, because kernels cannot run on none. `missing`
        # padding tokens make that number a multiple, or 1 if there are no rows.
        missing = -max(len(rows), 1) % self._token_multiple + (not len(rows))
        attention = _last_queries(outputs, missing, self._rules)
        tokens = OutputTokens(F.pad(last, (0, missing)), [attention])
        return self._forward([self._prefill_part(prefill)], tokens)[: len(rows)]

    def _all_hidden(self, prefill: PrefillInputs) -> Tensor:
        """Run a prefill and return the hidden states of all T tokens, [T, hidden_size], valid until
        the next forward."""
        inputs = prefill.inputs
        if self._graphs is not None and self._graphs.takes_all(inputs):
            return self._graphs.prefill_all(inputs, prefill.images)
        return self._forward([self._prefill_part(prefill)])[: len(inputs.input_ids)]

    def _output_rows(
        self, inputs: ModelInputs, last: Tensor, rows: npt.NDArray[np.int64]
    ) -> ModelInputs:
        """Return the last tokens of R rows as rows of one token each.

        Args:
            last: [R], the indices of these tokens among the T tokens.
            rows: [R] on the host, the indices of the rows.
        """
        index, windows = upload(rows, torch.int64, self.device), inputs.window_tables
        return ModelInputs(
            inputs.input_ids[last],
            inputs.positions[last],
            inputs.block_tables[index],
            np.ones_like(rows),
            inputs.context_lens[rows],
            window_tables=None if windows is None else windows[index],
        )

    def _logit_slots(
        self, inputs: ModelInputs, rows: npt.NDArray[np.int64] | None = None
    ) -> Tensor | None:
        """Return the adapter slots of the tokens whose logits are computed: of all tokens, or of
        the last tokens of `rows`. None if adapters do not change the output head."""
        if not self.model.adapts_logits or inputs.lora_slots is None:
            return None
        if rows is None:
            return inputs.lora_slots_of_tokens
        return inputs.lora_slots[upload(rows, torch.int64, self.device)]

    def _logits_of(self, hidden: Tensor, lora_slots: Tensor | None) -> Logits:
        """Compute logits. Without rows the head is skipped, because reading its weights takes as
        long as some layers."""
        if len(hidden):
            return self.divided_logits(hidden, lora_slots)
        return Logits(hidden.new_empty((0, self.model.vocab_size)), self.model.vocab_size)

    @torch.inference_mode()
    def decode(self, inputs: ModelInputs) -> ModelOutput:
        """Run a decode step of B rows of W tokens each, which fills the caches, and return the
        logits of all B · W tokens."""
        hidden = self.hidden_states(inputs)
        logits = self.divided_logits(hidden, self._logit_slots(inputs))
        return ModelOutput(logits, inputs.positions, hidden)

    def filled_rows(self, num_rows: int, width: int) -> int:
        """Return the most rows whose decode forward costs no more than that of `num_rows` rows with
        `width` tokens each, because both are padded to the size of the same captured graph."""
        graphs = self._graphs
        if graphs is None or not graphs.takes_decode(num_rows, width):
            return num_rows
        return graphs.decode_rows(num_rows, width)

    @torch.inference_mode()
    def hidden_states(self, inputs: ModelInputs) -> Tensor:
        """Run a decode step of B rows of W tokens each without computing logits. Returns the hidden
        states [B · W, hidden_size], valid until the next forward."""
        tokens = len(inputs.input_ids)
        width = tokens // inputs.num_rows
        if self._graphs is not None and self._graphs.takes_decode(inputs.num_rows, width):
            return self._graphs.decode(inputs)
        parts = [Part(inputs, width=width)]
        if missing := -tokens % self._token_multiple:
            parts.append(Part(self.scratch_inputs(np.array([missing]))))
        return self._forward(parts)[:tokens]

    @torch.inference_mode()
    def canvas_states(self, canvases: ModelInputs, context: ModelInputs | None) -> Tensor:
        """Run a forward of B canvases of L tokens each without computing logits. Returns the hidden
        states [B · L, hidden_size], valid until the next forward.

        Args:
            canvases: the canvases; their `hidden` is what they are conditioned on.
            context: rows with equally many tokens each that are added to the context in the same
                forward. The canvases attend to their keys and values. None if there are none.
        """
        parts = [Part(canvases, canvas=True)]
        parts += [Part(context)] if context is not None else []
        tokens = sum(len(part.inputs.input_ids) for part in parts)
        if missing := -tokens % self._token_multiple:
            parts.append(Part(self.scratch_inputs(np.array([missing]))))
        return self._forward(parts)[: len(canvases.input_ids)]

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, lora_slots: Tensor | None = None) -> Tensor:
        """Compute logits [R, vocab_size] in the model's dtype.

        Args:
            hidden: [R, hidden_size], the tokens' hidden states.
            lora_slots: [R], the tokens' adapter slots; None without adapters.
        """
        return self.divided_logits(hidden, lora_slots).whole()

    @torch.inference_mode()
    def class_scores(self, hidden: Tensor) -> Tensor:
        """Compute a classifier's scores [R, C]; see `TokenModel.class_scores`."""
        rows = len(hidden)
        if missing := -rows % self._token_multiple:
            hidden = F.pad(hidden, (0, 0, 0, missing))
        return self.model.class_scores(hidden)[:rows]

    @torch.inference_mode()
    def divided_logits(self, hidden: Tensor, lora_slots: Tensor | None = None) -> Logits:
        """Compute the logits of R tokens; each rank computes some of the columns. The arguments are
        as for `compute_logits`."""
        rows, model = len(hidden), self.model
        if missing := -rows % self._token_multiple:
            hidden = F.pad(hidden, (0, 0, 0, missing))
        with model.adapted_logits(None if lora_slots is None else F.pad(lora_slots, (0, missing))):
            rank_logits = model.own_logits(hidden)
        return Logits(rank_logits[:rows], model.vocab_size, model.parallel)

    @torch.inference_mode()
    def mixed(self, decode: ModelInputs, prefill: PrefillInputs) -> tuple[ModelOutput, ModelOutput]:
        """Run a decode step of one token per row and a prefill in one forward, which reads the
        weights only once. Returns the output of the decoding rows and that of the prefill."""
        inputs, rows = prefill.inputs, prefill.rows
        last = self._last_tokens(inputs, rows)
        count = len(decode.input_ids)
        hidden = None
        if self._graphs is not None and self._graphs.takes_chunk(inputs):
            decoded, hidden = self._graphs.mixed(decode, inputs, prefill.images)
            ending = hidden[last]
        elif prefill.all_hidden or self.caches.columns:
            all_states = self._forward([Part(decode, width=1), self._prefill_part(prefill, count)])
            decoded, hidden = all_states[:count], all_states[count:]
            ending = hidden[last]
        else:
            decoded, ending = self._mixed_states(decode, prefill, last)
        # One product computes the logits of both parts.
        slots = [self._logit_slots(decode), self._logit_slots(inputs, rows)]
        present = [tensor for tensor in slots if tensor is not None]
        logits = self.divided_logits(
            torch.cat((decoded, ending)), torch.cat(present) if present else None
        )
        if hidden is not None:
            hidden = hidden[: len(inputs.input_ids)]
        return (
            ModelOutput(logits[:count], decode.positions, decoded),
            ModelOutput(logits[count:], inputs.positions[last], hidden),
        )

    def _mixed_states(
        self,
        decode: ModelInputs,
        prefill: PrefillInputs,
        last: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run a decode step and a prefill whose last layer computes only the last tokens of R rows.
        Returns the hidden states of the decoding rows [B, hidden_size] and of these tokens [R,
        hidden_size].

        Args:
            last: [R] int64, the indices of the R tokens among the prefill's tokens.
        """
        rows, count, num_ends = prefill.rows, len(decode.input_ids), len(prefill.rows)
        missing = -(count + num_ends) % self._token_multiple
        attention = AttentionMetadata(
            decode.positions,
            tuple(decode.query_lens.tolist()),
            tuple(decode.context_lens.tolist()),
            decode.block_tables,
            decode_width=1,
            window_tables=decode.window_tables,
            rules=self._rules,
        )
        parts = [attention]
        if num_ends + missing:
            ends = self._output_rows(prefill.inputs, last, rows)
            parts.append(_last_queries(ends, missing, self._rules))
        index = torch.cat(
            (torch.arange(count, device=self.device), F.pad(last, (0, missing)) + count)
        )
        hidden = self._forward(
            [Part(decode, width=1), self._prefill_part(prefill, count)], OutputTokens(index, parts)
        )
        return hidden[:count], hidden[count : count + num_ends]

    def _last_tokens(self, inputs: ModelInputs, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return the indices [R] int64 of these rows' last tokens among all tokens."""
        return upload(inputs.query_lens.cumsum()[rows] - 1, torch.int64, self.device)

    def _prefill_part(self, prefill: PrefillInputs, concurrent_tokens: int = 0) -> Part:
        """Make the part of a prefill. On a CPU it has padding tokens, which make the tokens of the
        forward a multiple, of which `concurrent_tokens` belong to other parts."""
        inputs = prefill.inputs.pad_tokens(
            self._token_multiple, concurrent_tokens=concurrent_tokens
        )
        if len(set(inputs.query_lens.tolist())) == 1:
            return Part(inputs, images=prefill.images)
        rows = np.repeat(np.arange(inputs.num_rows, dtype=np.int32), inputs.query_lens)
        return Part(inputs, upload(rows, torch.int32, self.device), images=prefill.images)


def _last_queries(rows: ModelInputs, missing: int, rules: BitRules) -> AttentionMetadata:
    """Return the attention metadata of rows' last tokens, followed by `missing` padding tokens. The
    last token of a row attends to the whole row, so its attention is causal for any block
    length."""
    windows = rows.window_tables
    return AttentionMetadata(
        F.pad(rows.positions, (0, missing)),
        (1,) * (rows.num_rows + missing),
        (*rows.context_lens.tolist(), *[1] * missing),
        F.pad(rows.block_tables, (0, 0, 0, missing)),
        window_tables=None if windows is None else F.pad(windows, (0, 0, 0, missing)),
        rules=rules,
    )
