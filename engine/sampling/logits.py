"""Logits that are divided among ranks by columns, and gathered only when all columns are needed.

`ModelRunner` returns `Logits`; the sampler reads them.
"""

from __future__ import annotations

from torch import Tensor

from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.kernels.sampling.sampling_triton import Share, can_divide


class Logits:
    """The logits [R, V] of R tokens in the model's dtype.

    Args:
        logits: [R, C], contiguous, this rank's columns; they follow those of lower ranks. The last
            ones may lie past V.
        vocab_size: V.
        parallel: the ranks, with C columns each.
    """

    def __init__(self, logits: Tensor, vocab_size: int, parallel: TensorParallel = ALONE) -> None:
        self.own, self.vocab_size, self._parallel = logits, vocab_size, parallel
        self._whole: Tensor | None = None

    def __getitem__(self, rows: slice) -> Logits:
        return Logits(self.own[rows], self.vocab_size, self._parallel)

    def whole(self) -> Tensor:
        """Return all columns, [R, V]. With several ranks, all must call this; the first call
        gathers the columns."""
        if self._whole is None:
            self._whole = self._parallel.gather(self.own)[:, : self.vocab_size].contiguous()
        return self._whole

    def share_for(self, sampling: SamplingInputs) -> Share | None:
        """Return which columns this rank has, if tokens can be sampled from divided columns with
        these options. Returns None if all columns are needed in one place: for filters, and for
        options that change or describe many logits of a row."""
        ranks, columns = self._parallel.size, self.own.shape[1]
        needs_all = (
            sampling.any_filters
            or sampling.any_penalties
            or sampling.any_min_new_tokens
            or sampling.any_bans
            or sampling.max_top_logprobs
            or sampling.any_entropy
        )
        if ranks == 1 or needs_all or not self.own.is_cuda:
            return None
        if not can_divide(self.vocab_size, columns, ranks):
            return None
        first = self._parallel.rank * columns
        return Share(first, self.vocab_size, ranks, self._parallel.gather)
