"""The verb `batchgen batch IN OUT`: runs an OpenAI batch file as a job.

batchgen batch requests.jsonl results.jsonl model=hf model.path=Qwen/Qwen3-0.6B
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from batchgen.cli.job_outcome import report, verb
from batchgen.cli.verb_table import VerbParser
from batchgen.config.groups.config_keys import EXPERIMENT, GROUPS
from batchgen.util.errors import ConfigError
from batchgen.util.paths import short_user_path
from batchgen.util.text.text_table import counted

_ABOUT = """\
Run an OpenAI batch file as a job, and write a result line for each of its lines, in order:
{id, custom_id, response: {status_code, request_id, body}, error}. A line that is not a valid
request, or asks for something unsupported, gets an error; the other lines get their answers.

The job's folder is OUT.job. The same command resumes a stopped batch, and answers lines that were
added to the file. Options in a line win over those of the command.
"""


@verb
def main(arguments: Sequence[str]) -> int:
    """Run the verb, and return its exit code: 3 if some lines have errors."""
    parser = VerbParser("batch", _ABOUT)
    parser.add_argument(
        "given", metavar="IN", help="the batch file, one {custom_id, url, body} per line"
    )
    parser.add_argument("results", metavar="OUT", help="the file of result lines")
    parser.add_argument("keys", metavar="KEY=VALUE", nargs="*", default=[], help="keys of the job")
    args = parser.parse_args(arguments)
    from batchgen.api.batch_files.batch_job import (
        BatchPaths,
        batch_config,
        model_warning,
        refuse_other_file,
        write_requests,
        write_results,
    )
    from batchgen.api.python.configured_job import run_configured

    if "=" in args.results and re.split("[.=]", args.results.lstrip("+"))[0] in (
        *GROUPS,
        EXPERIMENT,
    ):
        raise ConfigError(
            f"batch: {args.results} is a key of the job, but the second argument is OUT, the file "
            f"of result lines: batchgen batch {args.given} OUT {args.results}"
        )
    paths = BatchPaths(short_user_path(args.given, "IN"), short_user_path(args.results, "OUT"))
    if not paths.user_path.is_file():
        raise ConfigError(f"batch: there is no file {args.given}")
    if not paths.results.absolute().parent.is_dir():
        raise ConfigError(f"batch: there is no folder for {args.results}: make it first")
    refuse_other_file(paths, args.results)
    summary = write_requests(paths)
    config = batch_config(paths, summary, args.keys)
    if (warning := model_warning(summary, config)) is not None:
        print(f"batchgen: warning: {warning}", file=sys.stderr)
    if summary.requests:
        code = report(lambda: run_configured(config))
        if code not in (0, 3):
            return code
    answered, failed = write_results(paths, config, any_rows=bool(summary.requests))
    print(f"{counted(answered, 'answer')} and {counted(failed, 'error')} in {args.results}")
    return 3 if failed else 0
