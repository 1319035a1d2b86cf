"""`batchgen … --dry-run`: prints the first prompts of a job and a short plan. The command calls
`show`."""

from __future__ import annotations

import sys

from batchgen.config.groups.job_config import JobConfig


def show(config: JobConfig) -> int:
    """Print the first prompts of a job as the model would read them, and the settings that decide
    the answers.

    No weights are read and nothing is written.

    Returns:
        The exit code: 3 if one of the rows that were looked at would get an error before it reaches
            the model, otherwise 0.

    Raises:
        ConfigError: the job would be refused. If the content of the output folder is the reason,
            the error is raised after everything is printed.
    """
    model, data = config.model.path, config.dataset.shown
    print(f"batchgen: reading model {model} and data set {data} …", file=sys.stderr, flush=True)
    from batchgen.jobs.resolve.early_checks import check_early

    check_early(config, folder=False)
    # These take seconds: hence the line above.
    from batchgen.jobs.launchers.launch import check_launcher
    from batchgen.jobs.planning.outline import outlined
    from batchgen.jobs.planning.outline_text import outline_entries, printed

    check_launcher(config, here=True)
    with outlined(config) as outline:
        opened = outline.opened
        numbers = str(opened.dtype).removeprefix("torch.")
        weights = opened.model.weights_text(opened.dtype, config.engine.device)
        if weights is not None:
            numbers += f" with weights in {weights}"
        print(printed(outline, outline_entries(outline, numbers)))
    if outline.refusal is not None:
        raise outline.refusal
    print("Nothing was run: this was --dry-run.")
    return 3 if outline.scan.bad else 0
