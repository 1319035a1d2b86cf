"""A head of the target that reads its hidden states: declared by the strategy, run by a runner of
its own over a cache with the same blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toy_hybrid import EPS, ToyHybridForCausalLM, fill, toy_config

from batchgen.engine.cache.specs import CacheSpec, KVSpec
from batchgen.engine.engine_config import EngineConfig
from batchgen.engine.execution.forward_context import ForwardContext
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelRunner, PrefillInputs
from batchgen.engine.layers.attention import Attention
from batchgen.engine.layers.decoder_layer import DecoderLayer
from batchgen.engine.layers.linear import Linear
from batchgen.engine.layers.mlp import GatedMLP
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models.token_model import TokenModel
from batchgen.engine.outputs import RequestOutput
from batchgen.engine.sampling.params import SamplingParams
from batchgen.engine.scheduling.scheduled_batch import PrefillBatch
from batchgen.engine.strategy import Head, ModelRole
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.step_inputs import Drafts, SpecStepInputs
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy

NEXT = "next"


class ToyHead(TokenModel):
    """One layer over a token's embedding and a hidden state of the target; its logits are made by
    the target's head."""

    reads_hidden = True

    def __init__(self, target: ToyHybridForCausalLM) -> None:
        super().__init__()
        self.device, self.dtype = target.device, target.dtype
        size = target.hidden_size
        place: dict[str, Any] = {"device": target.device, "dtype": target.dtype}
        self.hidden_size, self.vocab_size = size, target.vocab_size
        self.shape = KVSpec(2, 1, 32)
        self.fc = Linear(2 * size, size, bias=False, **place)
        attention = Attention(
            0, size, self.shape, qkv_bias=True, output_bias=False, norm_eps=None, **place
        )
        self.layer = DecoderLayer(
            attention,
            GatedMLP(size, size, bias=False, **place),
            RMSNorm(size, EPS, **place),
            RMSNorm(size, EPS, **place),
        )
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())
        self._target = [target]  # in a list, so that its weights are not the head's

    @property
    def cache_specs(self) -> Sequence[CacheSpec | None]:
        return [self.shape]

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        (target,) = self._target
        assert ctx.hidden is not None and target.model.rotary is not None
        merged = torch.cat((target.model.embed_tokens(input_ids), ctx.hidden), -1)
        # Heads of 32 values turn as those of 16 would, twice.
        cos, sin = target.model.rotary(positions).chunk(2, -1)
        cos_sin = torch.cat((cos, cos, sin, sin), -1)
        return self.layer(self.fc(merged), cos_sin, ctx, ctx.outputs)  # type: ignore[no-any-return]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._target[0].compute_logits(hidden)


class ToyWithHead(ToyHybridForCausalLM):
    def make_head(self, name: str) -> TokenModel:
        return ToyHead(self) if name == NEXT else super().make_head(name)


class HeadProposer:
    """Drafts with the head, one token after another, each from the head's own hidden state."""

    widths: tuple[int, ...] = (1,)
    needs_hidden = True

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.read = runner, 0

    def prefilled(
        self, state: SpecStepInputs, batch: PrefillBatch, inputs: ModelInputs, hidden: Tensor | None
    ) -> None:
        assert hidden is not None
        self.read += len(hidden)
        with_hidden = replace(inputs, hidden=hidden, state_slots=None, snapshots=None)
        self.runner.prefill(PrefillInputs(with_hidden, np.empty(0, np.int64)))

    def propose(self, state: SpecStepInputs, k: int) -> Drafts:
        ahead = state.positions_ahead(k)
        tokens, hidden, drafts = state.newest.input_ids, state.rows.hidden, []
        for j in range(k):
            inputs = replace(
                state.newest,
                input_ids=tokens,
                positions=ahead[:, j].contiguous(),
                hidden=hidden,
                state_slots=None,
            )
            hidden = self.runner.hidden_states(inputs).clone()
            tokens = self.runner.compute_logits(hidden).argmax(-1)
            drafts.append(tokens)
        counts = torch.full_like(tokens, k, dtype=torch.int32)
        return Drafts(torch.stack(drafts, 1), counts)

    def skipped(self, state: SpecStepInputs) -> None:
        """The next drafts do without what the head has not read."""


class HeadStrategy(ARSpecStrategy):
    @property
    def models(self) -> Mapping[str, ModelRole]:
        return {**super().models, "head": ModelRole((1,), source=Head(NEXT))}

    @property
    def needs_hidden(self) -> bool:
        return True

    def attach(self, runners: Mapping[str, ModelRunner]) -> None:
        super().attach(runners)
        self._proposer = self.proposer = HeadProposer(runners["head"])


def make_model(device: str, heads: Sequence[str]) -> ToyWithHead:
    config = replace(toy_config(layer_types="ara"), heads=(NEXT,))
    model = ToyWithHead(config, device=torch.device(device), dtype=torch.float32, heads=heads)
    fill(model)
    return model


def run(engine: LLMEngine) -> list[RequestOutput]:
    for i in range(10):
        prompt = [3 + (i * 7 + j) % 11 for j in range(5 + 3 * i)]
        params = SamplingParams(temperature=0.6 * (i % 2), max_new_tokens=10 + i, seed=i)
        engine.add_request(str(i), prompt, params)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    return [outputs[str(i)] for i in range(10)]


@pytest.mark.parametrize(
    ("device", "graph"),
    [
        ("cpu", False),
        pytest.param("cuda", False, marks=pytest.mark.gpu),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("k", [1, 3])
def test_a_head_drafts_and_tokens_stay(device: str, graph: bool, k: int) -> None:
    config = EngineConfig(
        max_num_seqs=4,
        max_batched_tokens=16,
        max_model_len=80,
        kv_cache_gib=0.002,
        block_size=4,
        cuda_graph=graph,
        overlap=True,
    )
    plain = run(LLMEngine(make_model(device, []), None, (), ARStrategy(), config))
    strategy = HeadStrategy(num_spec_tokens=k, adaptive=False)
    engine = LLMEngine(make_model(device, [NEXT]), None, (), strategy, config)
    assert [output.token_ids for output in run(engine)] == [output.token_ids for output in plain]
    assert strategy.proposer.read == engine.stats.prefill_tokens > 100
    assert engine.stats.counts["num_draft_tokens"] > 50


def test_the_plan_has_room_for_the_head() -> None:
    config = EngineConfig(max_num_seqs=2, max_model_len=64, kv_cache_gib=0.002)
    strategy = HeadStrategy(num_spec_tokens=1, adaptive=False)
    engine = LLMEngine(make_model("cpu", [NEXT]), None, (), strategy, config)
    per_token = 2 * (2 * 2 * 16) * 4 + 2 * 32 * 4  # two layers of the target, one of the head
    assert engine.memory.kv_cache == engine.memory.num_blocks * config.block_size * per_token


def test_a_head_that_was_not_loaded_is_missed() -> None:
    strategy = HeadStrategy(num_spec_tokens=1, adaptive=False)
    config = EngineConfig(max_model_len=64, kv_cache_gib=0.002)
    with pytest.raises(ValueError, match="needs the model's head 'next', which was not loaded"):
        LLMEngine(make_model("cpu", []), None, (), strategy, config)
    with pytest.raises(ValueError, match="has no head 'other': it has next"):
        make_model("cpu", ["other"])
