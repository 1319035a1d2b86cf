"""Runs one job or verb, and converts its result or exception to an exit code and a message for the
user. `batchgen/__main__.py` and all verbs use this."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence

from batchgen.api.python.configured_job import JobOutcome
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.text.colours import print_table


def report(run: Callable[[], JobOutcome]) -> int:
    """Run a job, print how it ended, and return the exit code."""
    try:
        result = run()
    except (ConfigError, JobError) as error:
        return refusal(error)
    except Exception:  # the traceback ends with the job's notes: what is saved, and how to resume
        traceback.print_exc()
        return 1
    if result.stopped_by is not None or result.exit_code == 4:
        print(result.message, file=sys.stderr)
    else:
        print_table(result.message)
    return result.exit_code


def refusal(error: ConfigError | JobError) -> int:
    """Print a ConfigError or JobError, and return its exit code: 2 or 1."""
    notes = list(error.__notes__) if hasattr(error, "__notes__") else []
    print(f"batchgen: {error}", *notes, sep="\n", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def be_quiet() -> None:
    """Silence the log lines and warnings of libraries, unless the user has set their environment
    variables."""
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "DATASETS_VERBOSITY": "error",
        "HF_HUB_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", module=r"transformers|datasets|huggingface_hub|torch")


def exit_code(work: Callable[[], int]) -> int:
    """Run a verb, and return its exit code.

    Errors for the user are printed. A closed pipe (`batchgen show OUT | head`), Ctrl-C and SIGTERM
    end the verb silently; the partial files that it was writing are removed.
    """
    is_main = threading.current_thread() is threading.main_thread()
    try:
        before = signal.signal(signal.SIGTERM, _end) if is_main else None
        code = work()
        sys.stdout.flush()
    except (ConfigError, JobError) as error:
        return refusal(error)
    except BrokenPipeError:
        # What is left in the buffer would raise once more when Python closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)
    return code


def _end(number: int, _: object) -> None:
    """Handle SIGTERM: raise SystemExit, so that `finally` blocks run."""
    sys.exit(128 + number)


def verb(main: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """Decorate the main function of a verb: errors are printed and become exit codes (see
    `exit_code`)."""
    return lambda arguments: exit_code(lambda: main(arguments))


def column_list(text: str) -> list[str]:
    """Return the names in a text such as `a,b`."""
    return [name.strip() for name in text.split(",") if name.strip()]
