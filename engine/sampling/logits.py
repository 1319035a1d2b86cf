"""Logits of which each rank has some columns, until somebody needs all."""

from __future__ import annotations

from torch import Tensor

from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.kernels.sampling.sampling_triton import Share, can_divide


class Logits:
    """The logits [R, V] of R tokens in the model's dtype.

    Args:
        own: [R, C], contiguous, the columns of this rank, which follow those of the ranks before
            it. The last ones may be past V.
        vocab_size: V.
        parallel: the ranks that have C columns each.
    """

    def __init__(self, logits: Tensor, vocab_size: int, parallel: TensorParallel = ALONE) -> None:
        self.own, self.vocab_size, self._parallel = logits, vocab_size, parallel
        self._whole: Tensor | None = None

    def __getitem__(self, rows: slice) -> Logits:
        return Logits(self.own[rows], self.vocab_size, self._parallel)

    def whole(self) -> Tensor:
        """Return all columns, [R, V]. On several ranks all must call this, and the first call sends
        every rank's columns to all others."""
        if self._whole is None:
            self._whole = self._parallel.gather(self.own)[:, : self.vocab_size].contiguous()
        return self._whole

    def share_for(self, sampling: SamplingInputs) -> Share | None:
        """Return which columns this rank has, if tokens can be drawn from them with these options;
        None if that takes all columns in one place. Filters do, and what changes or describes many
        logits of a row."""
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
