"""Train nano_hybrid: a small Qwen3.5-MoE that solves small arithmetic, and drafts its own tokens.

    python scripts/nano/train_nano_hybrid.py --out outputs/nano_model [--minutes 8] [--compile]

Half of the training problems are answered in plain text, half in JSON (see nano_problems.py). What
is written is a model folder, and in it held-out problems and what was measured (see Run in
nano_training.py): right answers, and tokens per forward with three drafts of the MTP head. The same
seed trains on the same problems; sums on a GPU may differ in their last bits.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from nano_batch import Batch, Decoded
from nano_hybrid import NanoHybrid
from nano_hybrid_config import FULL_EVERY, HybridConfig
from nano_speculation import DRAFTS, decode, losses
from nano_training import Run, arguments


@dataclass(frozen=True, slots=True)
class HybridLearner:
    """Learns the next token and the drafts behind it, and answers with `drafts` at a time."""

    model: NanoHybrid
    drafts: int = DRAFTS

    def loss(self, batch: Batch, generator: torch.Generator) -> torch.Tensor:
        return losses(self.model, batch).total()

    def held_out_loss(self, batch: Batch, generator: torch.Generator) -> torch.Tensor:
        return losses(self.model, batch).answer

    def decode(self, batch: Batch) -> Decoded:
        return decode(self.model, batch, self.drafts)


def main() -> None:
    args = _arguments()
    model = NanoHybrid(
        HybridConfig(hidden_size=args.hidden_size, num_layers=args.layers), args.seed
    )
    if args.compile:
        for layer in [*model.model.layers, *model.mtp.layers]:
            layer.compile(dynamic=False)
    Run(HybridLearner(model), model.config.to_hf(), args).finish({"drafts": DRAFTS})


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=8, help="every fourth has full attention")
    parser.add_argument("--compile", action="store_true", help="compile the layers: for a GPU")
    args = parser.parse_args()
    if args.layers < FULL_EVERY:
        parser.error(f"--layers must be at least {FULL_EVERY}, so that one has full attention")
    return args


if __name__ == "__main__":
    main()
