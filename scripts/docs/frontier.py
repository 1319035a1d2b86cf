"""Makes the picture of docs/guides/diffusion.md from a real sweep (a job for each value of a key):
the score of each job by its tokens per forward.

    python scripts/docs/frontier.py [--work FOLDER]

Writes docs/images/frontier.svg. Jobs of the sweep that the folder already has are not run again.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path

from batchgen.evals.arms.arm_folders import arm_folders
from batchgen.evals.arms.arm_table import arm_table
from batchgen.evals.arms.frontier import frontier
from batchgen.evals.arms.job_arms import job_arms
from batchgen.pages.report.sweep_report import frontier_chart

ROOT = Path(__file__).parents[2]
SWEEP = [
    *("--multirun", "+experiment=nano_sdar", "dataset.limit=80", "sampling.max_new_tokens=60"),
    *("strategy.confidence_threshold=0.3,0.5,0.7,0.9,0.97", "output.report=false"),
]
_STYLE = """
svg{background:#fbfaf8}text{font:12px system-ui,sans-serif;fill:#595c63}
.grid{stroke:#dedbd5}.axis{stroke:#595c63}.whisker{stroke:#4a7fc9;stroke-width:2}.dot{fill:#1d1d1f}
@media(prefers-color-scheme:dark){svg{background:#151619}text{fill:#a6a9b0}.grid{stroke:#35383f}
.axis{stroke:#a6a9b0}.whisker{stroke:#6f9fe0}.dot{fill:#e8e7e4}}
"""
"""The colours of reports (batchgen/pages/rows/base.css)."""


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--work", help="the folder of the sweep; a temporary one by default")
    work = Path(parser.parse_args().work or tempfile.mkdtemp()).absolute()
    command = [sys.executable, "-m", "batchgen", *SWEEP, f"output.dir={work}"]
    subprocess.run(command, cwd=ROOT, check=True)
    arms, column = job_arms(arm_folders([str(work)]), [])
    drawn = str(frontier_chart(frontier(arm_table(arms, column), "tokens_per_forward")).svg)
    # In a report the page has the styles; a file of its own needs them inside.
    styled = f'<svg xmlns="http://www.w3.org/2000/svg"\\1><style>{_STYLE}</style>'
    picture = re.sub("^<svg([^>]*)>", styled, drawn, count=1)
    (ROOT / "docs" / "images" / "frontier.svg").write_text(picture + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
