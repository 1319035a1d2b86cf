"""Where the time of ranks goes: what host, device and links do in each kind of step."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from measuring import DEVICE, synchronize
from torch import Tensor

from batchgen.engine.device.step_timing import StepTimer
from batchgen.engine.execution.cuda_graph import ForwardGraphs
from batchgen.engine.interface.outputs import HostCopy
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.parallel.rank_group import DistributedGroup

_SAMPLE_SECONDS = 0.002
_WINDOW = 12
"""Steps of a kind that are profiled, in the middle of all of that kind."""
_KERNELS, _PLACES, _SLOWEST = 14, 8, 6
"""How many lines are printed of each."""


class Plan(NamedTuple):
    """What a rank watches besides times."""

    name: str
    windows: tuple[tuple[str, int, int], ...] = ()  # kind, first step, the one past the last
    places: bool = False  # where the main thread is, sampled


@dataclass
class Kind:
    """Sums over the steps of a kind on one rank; times in seconds."""

    steps: int = 0
    rows: int = 0
    device: float = 0.0  # from the first launch of a step to the end of its last
    idle: float = 0.0  # of the device, before steps
    host: float = 0.0  # in steps, without waiting for results
    wait: float = 0.0  # for results
    between: float = 0.0  # from a step to the next: rank 0's caller, or a rank that waits for it
    collectives: Counter[str] = field(default_factory=Counter)


class Watch:
    """Watches the steps of a rank's engine."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._folder = rank, folder
        self._calls: Counter[str] = Counter()  # launches and bytes, by collective
        self._of_graph: dict[Any, Counter[str]] = {}
        self._compiled: list[tuple[int, str, float]] = []
        self._kinds: list[str] = []
        self._slow: list[dict[str, Any]] = []
        self._plan: Plan | None = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count collectives, those of CUDA graphs at each replay, and what is compiled. The engine
        must be made within this."""
        capture, replay = ForwardGraphs._capture, ForwardGraphs._replay

        def count_capture(graphs: ForwardGraphs, key: Any) -> Any:
            before = self._calls.copy()
            captured = capture(graphs, key)
            self._of_graph[key] = self._calls - before
            self._calls = before
            return captured

        def count_replay(graphs: ForwardGraphs, key: Any) -> Tensor:
            hidden = replay(graphs, key)
            self._calls += self._of_graph[key]
            return hidden

        def listen(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
            name = getattr(src, "name", "?") + (" (from the disk)" if cache_hit else "")
            self._compiled.append((len(self._kinds), name, times.total / 1e6))

        with ExitStack() as stack:
            for name in ("add_sum_norm", "gather"):
                stack.enter_context(mock.patch.object(DistributedGroup, name, self._counted(name)))
            stack.enter_context(mock.patch.object(ForwardGraphs, "_capture", count_capture))
            stack.enter_context(mock.patch.object(ForwardGraphs, "_replay", count_replay))
            stack.enter_context(mock.patch.object(triton.knobs.compilation, "listener", listen))
            yield

    def _counted(self, name: str) -> Any:
        """Return a method of `DistributedGroup` that counts its calls and the bytes of a rank."""
        original = getattr(DistributedGroup, name)

        def call(group: DistributedGroup, *arguments: Any, **options: Any) -> Any:
            tensor: Tensor = arguments[1 if name == "add_sum_norm" else 0]
            self._calls[name] += 1
            self._calls[f"{name} KiB"] += tensor.nbytes // 1024
            return original(group, *arguments, **options)

        return call

    def begin(self, engine: LLMEngine, plan: Plan) -> None:
        """Watch all steps from now on, until `end`."""
        self._plan, self._stack = plan, ExitStack()
        self._timer = StepTimer(DEVICE)
        engine._launcher.timer = self._timer
        self._found: dict[str, Kind] = defaultdict(Kind)
        self._places: dict[str, Counter[str]] = defaultdict(Counter)
        self._profiles: dict[str, list[tuple[str, float, float]]] = {}
        self._kinds, self._slow, self._compiled = [], [], []
        self._kind, self._wait, self._ended = "", 0.0, time.perf_counter()
        self._calls.clear()
        if plan.windows:  # a first profile takes seconds
            with _profiler():
                synchronize()
        launch, step, wait = engine._launcher.launch, engine._step, HostCopy.wait

        def watch_launch(batch: Any, catch_up: Any) -> Any:
            self._kind = type(batch).__name__.removesuffix("Batch").lower()
            return launch(batch, catch_up)

        def watch_wait(copy: HostCopy) -> Any:
            start = time.perf_counter()
            found = wait(copy)
            self._wait += time.perf_counter() - start
            return found

        def watch_step(compiled: Any) -> Any:
            self._open_window()
            start = time.perf_counter()
            self._kind, self._wait = "", 0.0
            outputs = step(compiled)
            end = time.perf_counter()
            self._note(start, end)
            self._close_window()
            self._ended = time.perf_counter()
            return outputs

        self._stack.enter_context(mock.patch.object(engine._launcher, "launch", watch_launch))
        self._stack.enter_context(mock.patch.object(engine, "_step", watch_step))
        self._stack.enter_context(mock.patch.object(HostCopy, "wait", watch_wait))
        if plan.places:
            self._stack.enter_context(self._sampling())

    def _note(self, start: float, end: float) -> None:
        kind = self._found[self._kind]
        kind.steps += 1
        kind.host += end - start - self._wait
        kind.wait += self._wait
        kind.between += start - self._ended
        kind.collectives += self._calls
        self._calls.clear()
        host = end - start - self._wait
        self._slow.append({"step": len(self._kinds), "kind": self._kind, "host": host})
        self._kinds.append(self._kind)

    def _open_window(self) -> None:
        assert self._plan is not None
        if any(first == len(self._kinds) for _, first, _ in self._plan.windows):
            synchronize()
            self._profiler = _profiler()
            self._profiler.start()

    def _close_window(self) -> None:
        assert self._plan is not None
        for kind, first, end in self._plan.windows:
            if end == len(self._kinds):
                synchronize()
                self._kind = "profiler"
                self._profiler.stop()
                self._profiles[kind] = _kernels(self._profiler, end - first)

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """Note every few milliseconds where this thread is."""
        own, done = threading.get_ident(), threading.Event()

        def sample() -> None:
            while not done.wait(_SAMPLE_SECONDS):
                place = _place(sys._current_frames()[own])
                self._places[self._kind or "before launch"][place] += 1

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def end(self, engine: LLMEngine) -> None:
        """Stop watching, and write what was seen."""
        assert self._plan is not None
        self._stack.close()
        for step in self._timer.steps():
            kind = self._found[step.kind]
            kind.rows += step.rows
            kind.device += step.seconds
            kind.idle += step.idle_before
        engine._launcher.timer = None
        found = {
            "rank": self._rank,
            "kinds": {
                name: vars(kind) | {"collectives": dict(kind.collectives)}
                for name, kind in self._found.items()
            },
            "order": self._kinds,
            "slowest": sorted(self._slow, key=lambda step: -step["host"])[:_SLOWEST],
            "compiled": self._compiled,
            "profiles": self._profiles,
            "places": {kind: places.most_common(_PLACES) for kind, places in self._places.items()},
        }
        path = report_path(self._folder, self._plan.name, self._rank)
        path.with_suffix(".part").write_text(json.dumps(found))
        path.with_suffix(".part").rename(path)


def _profiler() -> torch.profiler.profile:
    kind = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[kind.CUDA if DEVICE.type == "cuda" else kind.CPU])


def _kernels(profiler: torch.profiler.profile, steps: int) -> list[tuple[str, float, float]]:
    """Return the launches and microseconds per step of each kernel, most first."""
    name = f"self_{'device' if DEVICE.type == 'cuda' else 'cpu'}_time_total"
    found = [
        (event.key[:60], event.count / steps, getattr(event, name) / steps)
        for event in profiler.key_averages()
    ]
    return sorted(found, key=lambda kernel: -kernel[2])


def report_path(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}-{rank}.json"


def read_reports(folder: Path, name: str, ranks: int) -> list[dict[str, Any]]:
    """Wait for what all ranks write, and return it."""
    paths = [report_path(folder, name, rank) for rank in range(ranks)]
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, "a rank has not written its report"
        time.sleep(0.05)
    return [json.loads(path.read_text()) for path in paths]


def windows_of(order: Sequence[str]) -> tuple[tuple[str, int, int], ...]:
    """Choose steps of each kind to profile, in a run of these kinds of steps."""
    found = []
    for kind in sorted(set(order) - {""}):
        places = [index for index, name in enumerate(order) if name == kind]
        middle = places[len(places) // 2]
        end = middle
        while end < len(order) and order[end] == kind and end - middle < _WINDOW:
            end += 1
        found.append((kind, middle, end))
    return tuple(found)


def describe(reports: Sequence[Mapping[str, Any]]) -> str:
    """Say where the time went: a line for each kind of step and rank, and what stands out."""
    lines = []
    for kind in reports[0]["kinds"]:
        for report in reports:
            of = report["kinds"].get(kind)
            if of is None or not of["steps"]:
                continue
            steps = of["steps"]
            times = ", ".join(
                f"{name} {1e3 * of[name] / steps:.2f}"
                for name in ("device", "idle", "host", "wait", "between")
            )
            sent = ", ".join(f"{n / steps:.1f} {name}" for name, n in of["collectives"].items())
            lines.append(
                f"  {kind or 'nothing'} rank {report['rank']}: {steps} steps of "
                f"{of['rows'] / steps:.0f} rows, {of['device']:.2f} s; ms each: {times}; {sent}"
            )
    for report in reports:
        rank = report["rank"]
        slow = ", ".join(
            f"{step['kind']} {step['step']}: {1e3 * step['host']:.0f} ms"
            for step in report["slowest"]
        )
        lines.append(f"  slowest of rank {rank}: {slow}")
        made = report["compiled"]
        if made:
            names = ", ".join(f"{name} at {step}: {s:.2f} s" for step, name, s in made[:20])
            lines.append(f"  compiled by rank {rank}: {len(made)}: {names}")
        for kind, places in report["places"].items():
            total = sum(count for _, count in places)
            lines.append(f"  rank {rank} is, in {kind} ({total} samples):")
            lines += [f"    {count:6d} {place}" for place, count in places]
    for kind in reports[0]["profiles"]:
        busy = [sum(us for _, _, us in report["profiles"][kind]) for report in reports]
        lines.append(f"  kernels of {kind} steps, us a step: {[round(us) for us in busy]} by rank")
        others = [{name: us for name, _, us in report["profiles"][kind]} for report in reports]
        for name, count, us in reports[0]["profiles"][kind][:_KERNELS]:
            by_rank = [round(other.get(name, 0)) for other in others]
            lines.append(f"    {us:9.1f} us, {count:6.1f} of {name} {by_rank}")
    return "\n".join(lines)


def _place(frame: FrameType) -> str:
    """Name the innermost line of a thread, and the innermost one of this project."""
    leaf, own = frame, frame
    while own.f_back is not None and "/torch/" in own.f_code.co_filename:
        own = own.f_back
    codes = [(at.f_code, at.f_lineno) for at in ((own,) if own is leaf else (own, leaf))]
    return " > ".join(f"{Path(c.co_filename).name}:{line} {c.co_name}" for c, line in codes)
