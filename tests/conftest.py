"""Tiny random models, as folders that transformers saved, and a plain way to run one."""

from __future__ import annotations

import gc
import itertools
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from tests.support.cases import mark_all_but_quick
from tests.support.forks import pytest_addoption, pytest_runtestloop  # noqa: F401

# Triton decides when a kernel is defined: before any import of the project.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The process that hands tests to others imports neither transformers nor the project here.
if TYPE_CHECKING:
    from batchgen.engine.models.causal_lm import CausalLM

TinyModel = Callable[..., Path]
RunPaged = Callable[..., Tensor]


if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.support.kernels.interpreter import hasten_interpreter

    hasten_interpreter()

# Tests run beside each other: threads that wait for a busy core cost more than they bring.
torch.set_num_threads(1)

# How many examples hypothesis tries, whatever time they take: "all" is for `scripts/test --all`.
# Tests whose examples are dear take a share of the number.
any_time = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", any_time, max_examples=15)
settings.register_profile("all", any_time, max_examples=1000)
settings.load_profile("quick")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while tests are found: there is hardly any, and it takes a fifth of the
    time to look for it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave what all tests have imported out of every collection of garbage, as it is much."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # models die by themselves; few objects need a search


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # before the tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    mark_all_but_quick(items)


TEST_CPU_SECONDS = 2.0  # what a test may cost that is neither thorough nor slow
CPU_SECONDS_BEFORE = pytest.StashKey[float]()


def cpu_seconds() -> float:
    """CPU seconds of this process and of the processes that it, or its fork server, waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    if (server := forkserver._forkserver._forkserver_pid) is not None:  # type: ignore[attr-defined]
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return seconds


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    item.stash[CPU_SECONDS_BEFORE] = cpu_seconds()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "teardown":
        cost = cpu_seconds() - item.stash[CPU_SECONDS_BEFORE]
        item.user_properties.append(("cpu_seconds", cost))


def _cost(report: pytest.TestReport) -> float:
    (cost,) = (value for name, value in report.user_properties if name == "cpu_seconds")
    assert isinstance(cost, float)
    return cost


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the tests cost, and which cost more than a test may."""
    reports = [
        report
        for report in itertools.chain.from_iterable(terminalreporter.stats.values())
        if isinstance(report, pytest.TestReport) and report.when == "teardown"
    ]
    costs = {report: _cost(report) for report in reports}
    if costs:
        terminalreporter.write_line(f"{sum(costs.values()):.0f} CPU seconds in {len(costs)} tests")
    dear = [
        (cost, report.nodeid)
        for report, cost in costs.items()
        if cost > TEST_CPU_SECONDS and not {"thorough", "slow", "gpu"} & report.keywords.keys()
    ]
    if dear:
        terminalreporter.write_line(f"more than {TEST_CPU_SECONDS} CPU seconds (CONTRIBUTING.md):")
    for cost, name in sorted(dear, reverse=True):
        terminalreporter.write_line(f"{cost:6.1f} {name}")


@pytest.fixture(scope="session", autouse=True)
def fork_server_before_any_test() -> None:
    """A fork of a process with threads, or with what a test has patched, would have those."""
    if forked := sys.modules.get("tests.support.jobs.forked"):
        forked.fork_server()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """`tiny_model(kind, **config)` → folder of a random float32 model, saved by transformers.

    kind is `llama`, `qwen2`, `qwen3`, `qwen2_moe`, `qwen3_moe`, or `sdar` or `sdar_moe` (which have
    the same weights as qwen3 and qwen3_moe, and MASK_ID as their mask), or a hybrid: `qwen3_next`,
    `qwen3_5` and `qwen3_5_moe` (with a vision tower), `qwen3_5_text` and `qwen3_5_moe_text`, or one
    with latent attention: `deepseek_v2`, `deepseek_v3` and `glm4_moe_lite`, or `glm4_moe`,
    `minimax_m2`, `ministral3`, `mistral3` (with a vision tower), `olmo3`, `smollm3`, `gemma3_text`,
    `gemma4_text`, `gemma4_moe`, `gemma4_e2b`, `gemma3`, `gemma4`, `mistral3_small` or
    `llama4_tower` (with a vision tower), `gpt_oss`, or one of `CLASSES` in
    tests/support/engine/tiny_models.py. config overrides sizes. The projections of experts are
    saved apart (`split_experts=False` leaves those of a layer in one tensor, as gpt-oss's always
    are). `llada2_moe` and `fast_dllm_qwen` have the names and the configuration that their
    checkpoints have.
    `max_shard_size` saves it in shards. The same arguments give the same folder, which tests must
    not change.
    """
    from tests.support.engine.tiny_models import (
        name_fast_dllm,
        name_sdar,
        publish_llada2,
        random_model,
    )

    made: dict[str, Path] = {}

    def make(
        kind: str, *, max_shard_size: str = "1GB", split_experts: bool = True, **config: Any
    ) -> Path:
        key = repr((kind, max_shard_size, split_experts, sorted(config.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(kind)
            random_model(kind, config).save_pretrained(
                folder, max_shard_size=max_shard_size, save_original_format=split_experts
            )
            if kind.startswith("sdar"):
                name_sdar(folder / "config.json")
            elif kind == "llada2_moe":
                publish_llada2(folder)
            elif kind == "fast_dllm_qwen":
                name_fast_dllm(folder / "config.json")
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def reference_logits() -> Callable[[Path, Sequence[int]], Tensor]:
    """`reference_logits(folder, ids)` → transformers' logits [len(ids), vocab], float32."""
    from transformers import AutoModelForCausalLM, Mistral3ForConditionalGeneration

    def run(folder: Path, ids: Sequence[int]) -> Tensor:
        has_tower = json.loads((folder / "config.json").read_text())["model_type"] == "mistral3"
        kind = Mistral3ForConditionalGeneration if has_tower else AutoModelForCausalLM
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([list(ids)])).logits[0]
        return logits

    return run


@pytest.fixture(scope="session")
def run_paged() -> RunPaged:
    """`run_paged(model, ids, chunks)` → logits [len(ids), vocab], by one forward per chunk length.

    The KV goes to a paged cache whose blocks are out of order, and states to slot 1.
    """
    from batchgen.engine.caches.forward_context import ForwardContext, RowMetadata
    from batchgen.engine.caches.model_caches import CacheSizes
    from batchgen.engine.memory.model_use import ModelUse
    from batchgen.kernels.attention.metadata import AttentionMetadata

    def run(model: CausalLM, ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
        assert sum(chunks) == len(ids)
        device, block_size = model.device, 16
        num_blocks = -(-len(ids) // block_size)
        table = torch.arange(num_blocks, 0, -1, device=device)
        caches = ModelUse(model, (1,)).caches(CacheSizes(num_blocks + 1, block_size, 1))
        slot = torch.ones(1, dtype=torch.int64, device=device)
        logits, start = [], 0
        for size in chunks:
            positions = torch.arange(start, start + size, device=device)
            slots = table[positions // block_size] * block_size + positions % block_size
            attention = [AttentionMetadata(positions, (size,), (start + size,), table.unsqueeze(0))]
            starts = torch.tensor([0, size], dtype=torch.int32, device=device)
            rows = [RowMetadata(slot, positions, starts, None, None, (size,))]
            context = ForwardContext(caches.layers, slots, attention, rows)
            tokens = torch.tensor(ids[start : start + size], device=device)
            with torch.inference_mode():
                logits.append(model.compute_logits(model(tokens, positions, context)))
            start += size
        return torch.cat(logits)

    return run
