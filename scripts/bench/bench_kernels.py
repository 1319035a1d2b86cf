"""Time kernels beside the floor of the bytes that they move and of their operations.

    python scripts/bench/bench_kernels.py experts [--shape 35b-a3b] [--tokens 1,256,8192]
    python scripts/bench/bench_kernels.py mxfp4 [--shape gpt-oss-120b] [--tokens 1,256] [--tune]
    python scripts/bench/bench_kernels.py int4 [--tokens 1,32] [--tune]     # and nvfp4
    python scripts/bench/bench_kernels.py experts --tune

Each time is that of a launch in a CUDA graph. `--tune` tries the tiles of a list instead, compiled
beforehand in as many threads as there are CPUs, and prints the fastest as the table beside the
kernel has them. On a CPU the kernels run under TRITON_INTERPRET=1 and `--tiny`, to try the
benchmark itself.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cases import experts, four_bits, mxfp4
from measuring import (
    DEVICE,
    Case,
    Group,
    Rates,
    commas,
    measure_rates,
    microseconds,
    save_results,
    synchronize,
)
from triton.runtime.errors import OutOfResources

from batchgen.kernels.compile_ahead import can_compile_ahead, compiling_ahead
from batchgen.kernels.four_bit.fp4_layout import NVFP4
from batchgen.kernels.four_bit.panels import Layout

_WRONG = 0.02
"""The largest distance of two results, in units of the norm of one. Two roundings to bfloat16 make
about 0.003."""
_SHOWN = 4


class Section(NamedTuple):
    """The cases of a kind of kernel, groups of tiles that --tune tries, and defaults of options."""

    cases: Callable[[argparse.Namespace], Iterator[Case]]
    groups: Callable[[argparse.Namespace], Iterator[Group]]
    shape: str
    tokens: str


_EXPERT_TOKENS = "1,4,32,64,128,256,512,1024,4096,8192,16384"
_MXFP4_TOKENS = "1,8,32,128,256,1024,8192"


def _linear_section(layout: Layout) -> Section:
    cases = partial(four_bits.linear_cases, layout), partial(four_bits.linear_groups, layout)
    return Section(*cases, "qwen3-8b", _MXFP4_TOKENS)


SECTIONS = {
    "experts": Section(experts.expert_cases, experts.expert_groups, "30b-a3b", _EXPERT_TOKENS),
    "mxfp4": Section(mxfp4.mxfp4_cases, mxfp4.mxfp4_groups, "gpt-oss-20b", _MXFP4_TOKENS),
    "int4": _linear_section(four_bits.INT4),
    "nvfp4": _linear_section(NVFP4),
}


def time_of(case: Case, tiles: Any = None) -> float:
    return microseconds([partial(case.launch, tiles, i) for i in range(case.count)])


def timed(case: Case, rates: Rates | None) -> dict[str, Any]:
    """Time a case, and print its line: microseconds, those of the floor and their share, GB/s and
    TFLOP/s."""
    try:
        time = time_of(case)
    except (RuntimeError, ValueError, AttributeError) as error:  # an older torch, or GPU
        print(f"{case.name}: {str(error).splitlines()[0]}", flush=True)
        return {"name": case.name, "error": str(error)}
    found: dict[str, Any] = {"name": case.name, "us": time}
    line = f"{case.name:64}{time:10.2f}"
    if rates and (case.num_bytes or case.flops):
        floor = 1e6 * max(case.num_bytes / rates.bandwidth, case.flops / rates.flops)
        found |= {"floor_us": floor}
        line += f"{floor:10.2f}{floor / time:7.2f}"
        line += f"{case.num_bytes / time / 1e3:8.0f}{case.flops / time / 1e6:8.0f}"
    print(line, flush=True)
    return found


def fastest(case: Case, most: int | None = None) -> list[tuple[float, Any]]:
    """Time a kernel with each of its candidates, the fastest first.

    Candidates that do not compile, or whose results are not those of the first, are reported and
    left out.
    """
    found: list[tuple[float, Any]] = []
    expected: torch.Tensor | None = None
    for tiles in case.candidates[:most]:
        try:
            out = case.launch(tiles, 0)
            out.view(torch.uint8).fill_(255)  # NaN in every type
            result = case.launch(tiles, 0).float()
            synchronize()
        except (RuntimeError, OutOfResources) as error:  # too much shared memory, or registers
            print(f"  {tiles}: {str(error).splitlines()[0]}", flush=True)
            continue
        expected = result if expected is None else expected
        wrong = float((result - expected).norm() / expected.norm())
        if not wrong < _WRONG:
            print(f"  {tiles}: wrong by {wrong:.3f}", flush=True)
            continue
        found.append((time_of(case, tiles), tiles))
    return sorted(found, key=lambda tried: tried[0])


def tune(group: Group, most: int | None = None) -> list[tuple[float, Any]]:
    """Print the fastest tiles of each way, and the ways that take least, as lines of a table.

    At most `most` ways, and candidates of each, are tried.
    """
    totals: list[tuple[float, Any]] = []
    if can_compile_ahead() and DEVICE.type == "cuda":
        with compiling_ahead(os.cpu_count() or 1, partial(torch.cuda.set_device, 0)):
            for case in chain.from_iterable(group.ways.values()):
                for tiles in case.candidates:
                    case.launch(tiles, 0)
    for way, cases in [*group.ways.items()][:most]:
        best = []
        for case in cases:
            tried = fastest(case, most)
            if len(case.candidates) > 1:
                shown = ", ".join(f"{time:.1f} {tiles}" for time, tiles in tried[:_SHOWN])
                print(f"  {way} {case.name}: {shown}", flush=True)
            best += tried[:1]
        if len(best) == len(cases):
            entry = group.table(way, [tiles for _, tiles in best])
            totals.append((sum(time for time, _ in best), entry))
    totals.sort(key=lambda total: total[0])
    for time, entry in totals[:_SHOWN]:
        print(f"{group.name}: {time:.1f} µs {entry}", flush=True)
    return totals


def run_section(name: str, options: argparse.Namespace, rates: Rates | None) -> list[Any]:
    """Time the cases of a section, or its candidates, with the options that were not given."""
    section = SECTIONS[name]
    defaults: dict[str, Any] = {
        "shape": "tiny" if options.tiny else section.shape,
        "tokens": commas(int)("3" if options.tiny else section.tokens),
    }
    given = {key: value for key, value in vars(options).items() if value is not None}
    options = argparse.Namespace(**vars(options) | defaults | given)
    if not options.tune:
        return [timed(case, rates) for case in section.cases(options)]
    most, groups = 2 if options.tiny else None, section.groups(options)
    return [{"name": group.name, "best": str(tune(group, most)[:1])} for group in groups]


def main(arguments: list[str] | None = None) -> list[Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", type=commas(str, SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--shape", help="of a model")
    parser.add_argument("--tokens", type=commas(int), help="comma separated")
    parser.add_argument("--tune", action="store_true", help="try tiles, print the fastest")
    parser.add_argument("--tiny", action="store_true", help="sizes to try this on a CPU")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    rates = measure_rates()
    print(f"{torch.cuda.get_device_name()}: {rates}" if rates else "no GPU")
    print(f"{'':64}{'µs':>10}{'floor':>10}{'share':>7}{'GB/s':>8}{'TFLOP/s':>8}")
    found: list[Any] = []
    with torch.inference_mode():
        for name in options.sections:
            found += run_section(name, options, rates)
            synchronize()
            if rates:
                torch.cuda.empty_cache()
    save_results(options.json, "kernels", found)
    return found


if __name__ == "__main__":
    main()
