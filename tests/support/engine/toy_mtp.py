"""A tiny model with a head for multi-token prediction, as a model file would have it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.llama import LlamaForCausalLM
from batchgen.engine.models.mtp import MTPHead
from batchgen.engine.models.token_model import TokenModel
from tests.support.engine.engine_rows import weights


class ToyMTPForCausalLM(LlamaForCausalLM):
    """Llama whose head has a layer as the decoder's."""

    def make_head(self, name: str) -> TokenModel:
        return MTPHead(self, self.make_layer(0)) if name == "mtp" else super().make_head(name)


def with_head(
    folder: Path, *, device: str = "cpu", heads: Collection[str] = ("mtp",)
) -> ToyMTPForCausalLM:
    """The model of a folder that transformers saved, with a head that is often right: its layer is
    the target's first, and goes on from the token's embedding, with a little of the hidden state.
    """
    place: dict[str, Any] = {"device": torch.device(device), "dtype": torch.float32}
    plain = load_model(folder, **place)
    config = replace(plain.config, heads=("mtp",))
    model = ToyMTPForCausalLM(config, **place, heads=heads)
    values = weights(plain)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in weights(model).items():
        if name in values:
            parameter.copy_(values[name])
        elif "layers" in name:
            parameter.copy_(values[f"model.{name.removeprefix('mtp.')}"])
        elif name == "mtp.fc.weight":
            size = len(parameter)
            noise = torch.empty(size, size).normal_(0, 0.2 / size**0.5, generator=generator)
            parameter.copy_(torch.cat((torch.eye(size), noise), 1))
        elif name == "mtp.norm.weight":
            parameter.copy_(values["model.norm.weight"])
        else:
            parameter.copy_(torch.empty(len(parameter)).uniform_(0.9, 1.1, generator=generator))
    return model
