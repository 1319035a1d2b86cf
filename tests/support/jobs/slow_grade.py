"""A step that takes a moment for each row and says so, in this process or in a worker."""

import time
from dataclasses import dataclass
from typing import Any

from batchgen.evals.graders.step import AnswerRow, Column


@dataclass(frozen=True, kw_only=True)
class SlowMark:
    """Gives every answer the mark 0.5.

    Attributes:
        log: a file that gets a line for every call.
        isolated: whether it runs in a worker process.
    """

    version = 1

    log: str
    isolated: bool

    columns = (Column("mark", "float64", "one half"),)
    reads_text = False
    field_names = ("number",)
    value_names = ()

    def prepare(self) -> None:
        pass

    def apply(self, row: AnswerRow) -> dict[str, Any]:
        with open(self.log, "a") as file:
            file.write(f"{row.fields['number']}\n")
        time.sleep(0.004)
        return {"mark": 0.5}
