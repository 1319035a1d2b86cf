"""Measure what weights in FP8 change, over real prompts.

    python scripts/check/check_fp8.py gsm8k.jsonl [--device cuda] [--prompts 16]

The log-probabilities of the 20 likeliest tokens, at each position of greedy answers, are compared
with those of transformers in float32 over the same sequence: those of the model in bfloat16, of the
model in bfloat16 with weights that are rounded to FP8 while they load, and of the same with
activations rounded as well, as devices with units for FP8 compute it. On a GPU with such units the
kernels compute the last one, elsewhere their references do.

Activations are rounded as coarsely as weights, and the two errors are independent of each other. So
together they should make sqrt(2) times the error of weights alone; the check fails above twice that
error.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from check_parity import Errors, Reference
from real_rows import MODEL, chat_ids, finish, read_texts
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.base.outputs import RequestOutput
from batchgen.engine.loading.loader import Quantization, load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.model.open_model import OpenedModel, open_model
from batchgen.strategies.ar.strategy import ARStrategy

_TOP = 20
_LIMIT = 2.0
"""How many times the error of rounded weights that of rounded weights and activations may be."""


class Way(NamedTuple):
    """A way to compute.

    Attributes:
        name: as it is printed.
        quantization, native_fp8: as for `load_model`.
    """

    name: str
    quantization: Quantization | None
    native_fp8: bool = False


WAYS = (
    Way("bfloat16", None),
    Way("FP8 weights", "fp8"),
    Way("FP8 weights and activations", "fp8", native_fp8=True),
)


def answers(
    opened: OpenedModel, model: CausalLM, prompts: list[list[int]], new_tokens: int
) -> list[RequestOutput]:
    """Answer all prompts greedily, with the likeliest tokens of each position."""
    config = EngineConfig(max_num_seqs=16, kv_cache_gib=0.5, cuda_graph=False)
    engine = opened.engine(model, ARStrategy(), config)
    params = SamplingParams(temperature=0, max_new_tokens=new_tokens, top_logprobs=_TOP)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    return finish(engine, len(prompts))


def errors(outputs: list[RequestOutput], reference: Reference) -> Errors:
    """Compare answers with the reference over the same sequences."""
    found = Errors()
    for output in outputs:
        truth = reference.logprobs(output)
        ids = torch.from_numpy(output.columns["top_logprob_ids"]).long()
        values = torch.from_numpy(output.columns["top_logprobs"])
        others = torch.tensor(output.token_ids) != truth.argmax(-1)
        found.add((values - truth.gather(1, ids)).abs(), others)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="JSONL")
    parser.add_argument("--field", default="question", help="of a row: the user's message")
    parser.add_argument("--prompts", type=int, default=16, help="rows to read")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", default=MODEL, help="as for batchgen.LLM; not in FP8 itself")
    args = parser.parse_args()

    disable_progress_bar()
    set_verbosity_error()
    opened, device = open_model(args.model, None, "auto"), torch.device(args.device)
    if opened.config.form is not None:
        parser.error(f"{args.model} is in FP8 already: there is nothing to compare it with")
    texts = read_texts(args.rows, args.field, args.prompts)
    prompts = [chat_ids(opened.tokenizer, text) for text in texts]
    reference = Reference(opened.path, device, torch.float32)
    means: list[float] = []
    for way in WAYS:
        model = load_model(
            opened.path,
            device=device,
            dtype=torch.bfloat16,
            quantization=way.quantization,
            native_fp8=way.native_fp8,
        )
        found = errors(answers(opened, model, prompts, args.new_tokens), reference)
        means.append(found.mean)
        print(f"{way.name}: {found}", flush=True)
    plain, weights, both = means
    print(
        f"mean error of FP8 weights / bfloat16 {weights / plain:.2f}, with activations "
        f"{both / plain:.2f}"
    )
    raise SystemExit(0 if both <= _LIMIT * weights else 1)


if __name__ == "__main__":
    main()
