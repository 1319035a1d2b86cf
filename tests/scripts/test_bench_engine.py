"""The runs of the throughput benchmark, on a model so small that they take no time."""

import pytest
import torch
from measuring import DEVICE
from modes.engine_runs import Bench, full_batch
from modes.routing import Chance, expert_layers, run_rows
from workloads import BenchRequest, requests

from batchgen.engine.device.step_timing import PhaseSplit, StepTime
from batchgen.engine.interface.engine_config import EngineConfig

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench() -> Bench:
    config = EngineConfig(max_num_seqs=16, max_model_len=256, kv_cache_gib=0.01, overlap=False)
    return Bench("tiny", config)


@pytest.mark.thorough
def test_warm_up_meets_every_small_batch_and_the_largest(bench: Bench) -> None:
    bench.timer.reset()
    assert bench.warm_up(["smoke"], temperature=0.6) > 0
    rows = {step.rows for step in bench.timer.steps() if step.kind == "decode"}
    assert {16, 12, *range(1, 9)} <= rows


def test_a_run_counts_all_tokens_and_shares_none_with_the_last(bench: Bench) -> None:
    for _ in range(2):
        run = bench.run("smoke", temperature=0.6, here=None)
        load = requests("smoke", vocab=512)
        assert run.output_tokens == sum(r.output_len for r in load)
        assert run.prompt_tokens == sum(len(r.prompt) for r in load)
        assert run.cached_tokens == 0 and run.preemptions == 0
        # The prefill gives each row its first token, a decode step every other.
        assert run.decode.rows == run.output_tokens - len(load)
        assert run.prefill.steps >= 1
        busy = run.prefill.seconds + run.decode.seconds + run.idle
        assert 0 < busy <= run.seconds
        assert 0 < run.peak_kv_usage <= 1


def test_the_first_run_is_on_the_requests_of_the_comparison() -> None:
    config = EngineConfig(max_model_len=256, kv_cache_gib=0.01)
    bench = Bench("tiny", config)
    assert bench.load("smoke") == requests("smoke", vocab=512)
    assert bench.load("smoke") != requests("smoke", vocab=512)


def test_groups_of_decode_steps() -> None:
    steps = [
        StepTime("prefill", 40, 5.0, 0.0),
        StepTime("decode", 40, 1.0, 0.5),
        StepTime("decode", 40, 2.0, 0.25),
        StepTime("decode", 33, 3.0, 0.0),
        StepTime("decode", 32, 4.0, 0.0),
    ]
    assert full_batch(steps) == PhaseSplit(1, 40, 2.0, 0.25)
    assert full_batch([]) == PhaseSplit(0, 0, 0, 0)


def test_a_dense_model_has_nothing_to_route() -> None:
    with pytest.raises(ValueError, match="no"):
        Bench("tiny", EngineConfig(max_model_len=256, kv_cache_gib=0.01), routing="uniform")


def test_same_routing_is_that_of_one_token() -> None:
    config = EngineConfig(max_num_seqs=4, max_model_len=256, kv_cache_gib=0.01)
    bench = Bench("tiny-moe", config, columns=("routed_experts",), routing="same")
    rows = bench.rows([BenchRequest([5, 6, 7], 2)], temperature=0.6)
    _, (output,) = run_rows(bench.engine, rows)
    assert len({ids.tobytes() for ids in output.columns["routed_experts"].reshape(-1, 2)}) == 1


def test_uniform_routing_is_another_at_each_call() -> None:
    config = EngineConfig(max_num_seqs=4, max_model_len=256, kv_cache_gib=0.01)
    bench = Bench("tiny-moe", config, routing="uniform")
    gate = expert_layers(bench.weights)[0].gate
    x = torch.zeros((3, 64), device=DEVICE)
    first, second = gate(x), gate(x)
    assert first.shape == (3, 8) and first.dtype == torch.float32
    assert not torch.equal(first, second)


def test_requests_ask_for_columns() -> None:
    config = EngineConfig(max_num_seqs=4, max_model_len=256, kv_cache_gib=0.01)
    bench = Bench("tiny-moe", config, columns=("routed_experts",))
    rows = bench.rows([BenchRequest([5, 6, 7], 2)], temperature=0.6)
    _, (output,) = run_rows(bench.engine, rows)
    assert output.columns["routed_experts"].shape == (4, 2, 2)


def test_random_logits_differ_between_layers_and_forwards() -> None:
    chance = Chance(3, 4)
    drawn = [chance.logits(layer, 5, CPU) for _ in range(3) for layer in range(3)]
    assert all(logits.shape == (5, 4) for logits in drawn)
    assert len({tuple(logits.flatten().tolist()) for logits in drawn}) == 9


def test_layers_with_fewer_tokens_or_of_a_head_that_runs_again_have_others() -> None:
    chance = Chance(3, 4)
    calls = [(0, 5), (1, 5), (2, 2), (2, 2), (2, 5000), (0, 5)]
    drawn = [chance.logits(layer, tokens, CPU) for layer, tokens in calls]
    assert [len(logits) for logits in drawn] == [tokens for _, tokens in calls]
    assert not torch.equal(drawn[2], drawn[3]) and not torch.equal(drawn[0], drawn[5])
