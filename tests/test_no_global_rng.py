"""Randomness is counter-based (kernels/sampling/philox.py): no code holds or reads an RNG state."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Dummy weights, the products by which the library is checked, and the factors of digests are made
# once, before any row runs, and are part of no result's key. A generated row of RULER draws from a
# generator that its seed and its number make, and nothing else does.
ALLOWED = {
    Path("engine/loading/loader.py"),
    Path("kernels/library.py"),
    Path("engine/operation_digests.py"),
    Path("batchgen/inputs/steps/ruler.py"),
    Path("batchgen/inputs/steps/ruler_texts.py"),
}
STATEFUL = re.compile(
    r"""torch\.(rand\w*|multinomial|bernoulli|normal|poisson|seed|initial_seed|manual_seed|Generator)\b
    | \.(multinomial|exponential_|uniform_|normal_|bernoulli_|random_|geometric_|cauchy_)\(
    | \bmanual_seed\b
    | \b(np|numpy)\.random\b
    | ^\s*(import|from)\s+random\b""",
    re.VERBOSE | re.MULTILINE,
)


def _sources() -> list[Path]:
    folders = ("engine", "kernels", "strategies", "batchgen")
    # rglob does not follow the links inside batchgen/, so each file comes once.
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return [path for path in found if path.relative_to(ROOT) not in ALLOWED]


def test_no_source_uses_stateful_randomness() -> None:
    sources = _sources()
    assert ROOT / "kernels" / "sampling" / "philox.py" in sources
    uses = {
        str(path.relative_to(ROOT)): match.group().strip()
        for path in sources
        if (match := STATEFUL.search(path.read_text()))
    }
    assert not uses


@pytest.mark.parametrize(
    "line",
    [
        "noise = torch.rand(3)",
        "torch.randn_like(x)",
        "x.exponential_()",
        "probs.multinomial(1)",
        "g = torch.Generator()",
        "from torch import manual_seed",
        "import random",
        "rng = np.random.default_rng()",
    ],
)
def test_the_pattern_finds_what_it_should(line: str) -> None:
    assert STATEFUL.search(line)


@pytest.mark.parametrize("line", ["from collections.abc import Generator", "random_rows = 1"])
def test_the_pattern_leaves_the_rest(line: str) -> None:
    assert not STATEFUL.search(line)
