"""The columns of choices that are scored."""

import numpy as np

from batchgen.engine.interface.outputs import OutputColumn

CHOICE_LOGPROBS = OutputColumn("choice_logprobs", np.dtype(np.float64), scope="choice")
"""The log-probability of each choice: the sum over its tokens."""
CHOICE_SCORES = OutputColumn("choice_scores", np.dtype(np.float64), scope="choice")
"""The probability of each choice among all choices of the row."""
