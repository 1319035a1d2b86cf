"""Makes helpers beside the tests and the scripts importable; no test folder is a package."""

import sys
from pathlib import Path

_TESTS = Path(__file__).parent
sys.path[:0] = [str(_TESTS), str(_TESTS.parents[1] / "scripts")]
