"""Functions of single values have the same bits wherever a value stands, on any number of threads.

Which functions of PyTorch and NumPy do not is measured, and the tree is searched for them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.layers import elementwise
from batchgen.kernels.layers.elementwise import expm1, gelu, gelu_tanh, sigmoid, silu, softplus
from tests.support.imports import syntax_tree

ROOT = Path(__file__).parents[3]
Function = Callable[[Tensor], Tensor]
TRANSCENDENTAL = set(
    "acos acosh asin asinh atan atan2 atanh celu cos cosh digamma elu erf erfc erfinv exp exp2"
    " expm1 float_power gelu glu lgamma log log10 log1p log2 log_sigmoid log_softmax logaddexp"
    " logit logsigmoid logsumexp mish pow power rsqrt selu sigmoid silu sin sinc sinh softmax"
    " softmin softplus sqrt swish tan tanh tanhshrink xlogy".split()
)
"""Names of functions that a CPU may compute in two ways, also with "_" behind them, and as modules
(`nn.GELU`)."""

SAFE: dict[str, Function] = {
    "cos": torch.cos,
    "exp": torch.exp,
    "log": lambda x: x.abs().log(),
    "log_softmax": lambda x: x.log_softmax(-1),
    "numpy.exp": lambda x: torch.from_numpy(np.exp(x.double().numpy())),
    "rsqrt": lambda x: x.abs().rsqrt(),
    "sin": torch.sin,
    "softmax": lambda x: x.softmax(-1),
    "tanh": torch.tanh,
}
"""What the tree may call, in float32. The test below measures each."""

OURS: dict[str, Function] = {
    "sigmoid": sigmoid, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu, "softplus": softplus,
    "expm1": expm1,
}  # fmt: skip
LIBRARY: dict[str, Function] = {
    "sigmoid": torch.sigmoid, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "gelu": F.gelu,
    "expm1": torch.expm1,
}  # fmt: skip


@pytest.fixture(params=(1, 2, 3))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def values(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(width)) * 3


def changed(function: Function, shapes: tuple[tuple[int, int], ...]) -> int:
    """Count values whose bits differ between a call with all rows and one with fewer, of other
    widths, strides and places in memory."""
    count = 0
    for rows, width in shapes:
        x = values(rows, width)
        whole = function(x)
        for start, stop in ((0, 1), (1, 2), (0, 3), (rows // 3, rows - 1)):
            part = function(x[start:stop])
            count += int((part != whole[start:stop]).sum())
        wide = torch.empty(rows, width + 5)[:, 2 : width + 2].copy_(x)
        count += int((function(wide) != whole).sum())
    return count


SHAPES = ((40, 1), (47, 3), (31, 17), (9, 100), (7, 1003), (5, 16385), (3, 33001))


@pytest.mark.quick(4, thorough=5)
@pytest.mark.parametrize("name", OURS)
def test_ours_compute_all_values_alike(name: str, threads: int) -> None:
    assert changed(OURS[name], SHAPES) == 0


@pytest.mark.quick(2, thorough=9)
@pytest.mark.parametrize("name", SAFE)
def test_what_may_be_called_computes_all_values_alike(name: str, threads: int) -> None:
    assert changed(SAFE[name], SHAPES) == 0


def test_the_measurement_finds_what_does_not() -> None:
    if "AVX" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("known of x86 processors alone")
    unsafe: list[Function] = [torch.sigmoid, F.silu, F.softplus, LIBRARY["gelu_tanh"], torch.exp2]
    for function in unsafe:
        assert changed(function, SHAPES) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LIBRARY)
def test_whole_vectors_keep_the_bits_of_pytorch(name: str, dtype: torch.dtype) -> None:
    x = values(64, 1024).to(dtype)
    assert torch.equal(OURS[name](x), LIBRARY[name](x))


def test_formulas_are_right() -> None:
    x = values(50, 40).double()
    others: dict[str, Function] = {"silu": F.silu, "softplus": F.softplus}
    expected = LIBRARY | others
    for name, compute in OURS.items():
        torch.testing.assert_close(compute(x), expected[name](x))
        assert compute(x[:0]).shape == (0, 40)


def calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each transcendental function that a module calls or hands on,
    "numpy.exp" if it is NumPy's; kernels in Triton and numbers of `math` are none."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        base = node.value.id if isinstance(node.value, ast.Name) else ""
        name = node.attr.lower().rstrip("_")
        if name not in TRANSCENDENTAL or base in ("tl", "libdevice", "math"):
            continue
        if id(node) in called or base in ("torch", "F", "nn", "np"):
            yield node.lineno, f"numpy.{name}" if base == "np" else name


def test_no_other_function_is_called() -> None:
    found, own = set(), Path(elementwise.__file__).resolve()
    for folder in ("kernels", "engine", "strategies"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.resolve() != own:
                lines = calls(syntax_tree(path))
                found |= {(str(path.relative_to(ROOT)), line, name) for line, name in lines}
    unsafe = sorted(f"{path}:{line}: {name}" for path, line, name in found if name not in SAFE)
    assert not unsafe, "call kernels/layers/elementwise.py, or measure it and add it to SAFE"
    assert {name for _, _, name in found} >= SAFE.keys(), "SAFE lists what nothing calls"


def test_the_search_finds_calls_references_and_modules() -> None:
    text = "y = F.silu(x)\nx.sigmoid_()\nf = torch.tanh\nm = nn.GELU()\nform.sigmoid\ntl.exp(x)\n"
    names = [name for _, name in sorted(calls(ast.parse(text)))]
    assert names == ["silu", "sigmoid", "tanh", "gelu"]
