"""Time kernels, and compare each with its floor: the time of its bytes or operations at full rate.

    python scripts/bench/bench_kernels.py experts [--shape 35b-a3b] [--tokens 1,256,8192]
    python scripts/bench/bench_kernels.py mxfp4 [--shape gpt-oss-120b] [--tokens 1,256]
    python scripts/bench/bench_kernels.py int4 [--tokens 1,32]     # and nvfp4
    python scripts/bench/bench_kernels.py attention [--shape hybrid-35b-a3b] [--tokens 1024,8192]

Launches are timed in a CUDA graph. To try the benchmark itself on a CPU, set TRITON_INTERPRET=1 and
pass `--tiny`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cases import attention, experts, four_bits, mxfp4
from measuring import Case, Rates, commas, measure_rates, microseconds, save_results, synchronize

from batchgen.kernels.four_bit.fp4_layout import NVFP4


class Section(NamedTuple):
    """One kind of kernel: a function that yields its cases, and the defaults of options."""

    cases: Callable[[argparse.Namespace], Iterator[Case]]
    shape: str  # the default of `--shape`
    tokens: str  # the default of `--tokens`


_EXPERT_TOKENS = "1,4,32,64,128,256,512,1024,4096,8192,16384"
_MXFP4_TOKENS = "1,8,32,128,256,1024,8192"

SECTIONS = {
    "experts": Section(experts.expert_cases, "30b-a3b", _EXPERT_TOKENS),
    "mxfp4": Section(mxfp4.mxfp4_cases, "gpt-oss-20b", _MXFP4_TOKENS),
    "attention": Section(attention.prefill_cases, "qwen3-8b", "1024,2048,4096,8192"),
    "int4": Section(partial(four_bits.linear_cases, four_bits.INT4), "qwen3-8b", _MXFP4_TOKENS),
    "nvfp4": Section(partial(four_bits.linear_cases, NVFP4), "qwen3-8b", _MXFP4_TOKENS),
}


def timed(case: Case, rates: Rates | None) -> dict[str, Any]:
    """Time a case, print its line (µs, floor in µs, floor / µs, GB/s, TFLOP/s), and return its
    figures, or the `error` of a case that this torch or GPU does not support."""
    try:
        time = microseconds([partial(case.launch, i) for i in range(case.count)])
    except (RuntimeError, ValueError, AttributeError) as error:  # an older torch, or GPU
        print(f"{case.name}: {str(error).splitlines()[0]}", flush=True)
        return {"name": case.name, "error": str(error)}
    figures: dict[str, Any] = {"name": case.name, "us": time}
    line = f"{case.name:64}{time:10.2f}"
    if rates and (case.num_bytes or case.flops):
        floor = 1e6 * max(case.num_bytes / rates.bandwidth, case.flops / rates.flops)
        figures |= {"floor_us": floor}
        line += f"{floor:10.2f}{floor / time:7.2f}"
        line += f"{case.num_bytes / time / 1e3:8.0f}{case.flops / time / 1e6:8.0f}"
    print(line, flush=True)
    return figures


def run_section(name: str, options: argparse.Namespace, rates: Rates | None) -> list[Any]:
    """Time the cases of a section. Options that are None get the section's defaults."""
    section = SECTIONS[name]
    defaults: dict[str, Any] = {
        "shape": "tiny" if options.tiny else section.shape,
        "tokens": commas(int)("3" if options.tiny else section.tokens),
    }
    chosen = {key: value for key, value in vars(options).items() if value is not None}
    options = argparse.Namespace(**vars(options) | defaults | chosen)
    return [timed(case, rates) for case in section.cases(options)]


def main(arguments: list[str] | None = None) -> list[Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", type=commas(str, SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--shape", help="a model whose layers are timed, such as 30b-a3b")
    parser.add_argument("--tokens", type=commas(int), help="comma separated")
    parser.add_argument("--tiny", action="store_true", help="sizes to try this on a CPU")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    rates = measure_rates()
    print(f"{torch.cuda.get_device_name()}: {rates}" if rates else "no GPU")
    print(f"{'':64}{'µs':>10}{'floor':>10}{'share':>7}{'GB/s':>8}{'TFLOP/s':>8}")
    results: list[Any] = []
    with torch.inference_mode():
        for name in options.sections:
            results += run_section(name, options, rates)
            synchronize()
            if rates:
                torch.cuda.empty_cache()
    save_results(options.json, "kernels", results)
    return results


if __name__ == "__main__":
    main()
