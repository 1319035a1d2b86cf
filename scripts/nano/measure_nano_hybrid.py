"""Measure a folder of nano_hybrid by itself: right answers, and tokens per forward with drafts.

    python scripts/nano/measure_nano_hybrid.py batchgen/data/nano_hybrid [--rows 500] [--drafts 3]

Every forward computes the rows from their beginning, so that 500 problems take some minutes on a
CPU. For what a job gets there is score_nano.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from nano_exam import Exam
from nano_hybrid import load
from nano_problems import FORMS, held_out_set
from nano_speculation import DRAFTS
from nano_tokenizer import build_tokenizer
from nano_training import Formatter
from train_nano_hybrid import HybridLearner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=500, help="held-out problems, in each form")
    parser.add_argument("--drafts", type=int, default=DRAFTS, help="0 drafts nothing")
    parser.add_argument("--seed", type=int, default=0, help="that the model was trained with")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    learner = HybridLearner(load(args.folder).to(device), args.drafts)
    exam = Exam(held_out_set(args.rows, args.seed), build_tokenizer(), device)
    for form in FORMS:
        print(f"{form}: {exam.grade(learner, form)}")


if __name__ == "__main__":
    main()
