"""Train nano_sdar: a few million parameters that solve small arithmetic by block diffusion.

    python scripts/nano/train_nano_sdar.py --out outputs/nano_model [--minutes 8] [--seed 0]

Half of the training problems are answered in plain text, half in JSON (see nano_problems.py). What
is written is a model folder, and in it held-out problems and what was measured (see Run in
nano_training.py). The same seed trains on the same problems with the same noise; sums on a GPU may
differ in their last bits.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from nano_batch import SEQUENCE_LENGTH, Batch, Decoded
from nano_diffusion import decode, diffusion_loss
from nano_sdar import NanoConfig, NanoSDAR
from nano_training import Run, arguments

HEAD_DIM = 64
THRESHOLD = 0.9
"""The confidence above which a token is unmasked when the model is measured."""


@dataclass(frozen=True, slots=True)
class SDARLearner:
    """Learns by block diffusion and answers by confidence."""

    model: NanoSDAR

    def loss(self, batch: Batch, generator: torch.Generator) -> torch.Tensor:
        return diffusion_loss(self.model, batch, generator)

    def held_out_loss(self, batch: Batch, generator: torch.Generator) -> torch.Tensor:
        return diffusion_loss(self.model, batch, generator)

    def decode(self, batch: Batch) -> Decoded:
        return decode(self.model, batch, THRESHOLD)


def main() -> None:
    args = _arguments()
    model = NanoSDAR(_config(args), args.seed)
    Run(SDARLearner(model), model.config.to_hf(), args).finish({"threshold": THRESHOLD})


def _config(args: argparse.Namespace) -> NanoConfig:
    size = args.hidden_size
    heads = size // HEAD_DIM
    return NanoConfig(
        hidden_size=size,
        num_layers=args.layers,
        num_heads=heads,
        num_kv_heads=max(heads // 2, 1),
        head_dim=HEAD_DIM,
        intermediate_size=3 * size,
        block_size=args.block_size,
    )


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--block-size", type=int, default=4, help="a divisor of 192")
    args = parser.parse_args()
    if args.hidden_size % HEAD_DIM or SEQUENCE_LENGTH % args.block_size:
        parser.error("--hidden-size must be a multiple of 64, --block-size a divisor of 192")
    return args


if __name__ == "__main__":
    main()
