"""The Ray cluster of `launcher=ray`: connecting to it, counting the workers that fit, and placing
them."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from batchgen.util.errors import ConfigError

_ANSWER_SECONDS = 10.0  # for a connection to the address that the user gave
_LOOK_SECONDS = 2.0  # between two looks whether the cluster's head lives
_MOST_MISSES = 3  # failed looks in a row after which the head counts as dead
_UNITS = {"GPU": "GPU", "CPU": "CPU core"}
Need = Mapping[str, float]
"""The resources of a node that one worker takes, by Ray's names for them."""


@contextmanager
def cluster(address: str | None, runtime_env: Mapping[str, Any]) -> Iterator[None]:
    """Connect to the cluster at an address. A cluster that was started for this connection ends
    with it.

    Raises:
        ConfigError: there is no such cluster, or Ray refuses `runtime_env`.
    """
    if ray.is_initialized():  # by a program that calls `run_job`
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    more: dict[str, Any] = {}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        more["include_dashboard"] = False
    _check_answers(address)
    in_main = threading.current_thread() is threading.main_thread()
    previous_handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            runtime_env=dict(runtime_env) or None,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **more,
        )
    except (ValueError, TypeError) as error:
        ray.shutdown()
        raise ConfigError(
            f"launcher=ray: Ray refuses launcher.address={address} or launcher.runtime_env="
            f"{dict(runtime_env)}: {_first_line(error)}"
        ) from None
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        ray.shutdown()
        raise _no_cluster(address, error) from None
    finally:
        if in_main:  # Ray has put its own handler there
            signal.signal(signal.SIGTERM, previous_handler)
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise ConfigError if nothing listens at the address, because Ray would wait for minutes."""
    try:
        _listens(address.rpartition("://")[2], _ANSWER_SECONDS)
    except OSError as error:
        raise _no_cluster(address, error) from None


def _listens(address: str, seconds: float) -> bool:
    """Connect to an address of the form HOST:PORT and return True; return False for another form.

    Raises:
        OSError: nothing listens there.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdecimal() and len(port) < 6):
        return False
    socket.create_connection((host.strip("[]"), int(port)), seconds).close()
    return True


class Heart:
    """Watches whether the cluster's head lives, because calls to Ray neither end nor fail without
    it.

    A head that this machine cannot reach (with `ray://`) is taken to live.
    """

    def __init__(self) -> None:
        self._address: str = ray.get_runtime_context().gcs_address
        self._next_look = 0.0
        self._misses = 0
        self._is_reached = self._beats()

    def is_gone(self) -> bool:
        """Whether the head did not answer at several looks in a row."""
        if self._is_reached and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            self._misses = 0 if self._beats() else self._misses + 1
        return self._misses >= _MOST_MISSES

    def _beats(self) -> bool:
        try:
            return _listens(self._address, _LOOK_SECONDS)
        except OSError:
            return False


def _no_cluster(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"launcher=ray: no cluster at launcher.address={address}: {_first_line(error)}: start one "
        "with `ray start --head`, give the address of one that runs, or leave launcher.address out "
        "for a cluster of this machine"
    )


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def living_nodes() -> tuple[list[dict[str, Any]], bool]:
    """The living nodes of the cluster as `ray.nodes()` describes them, and whether any of them has
    GPUs."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return nodes, any(node["Resources"].get("GPU") for node in nodes)


def count_workers(asked_for: int | None, nodes: Sequence[Mapping[str, Any]], need: Need) -> int:
    """The number of workers of the job, each of which takes `need` of a node.

    `asked_for` is the number that the user has set, or None for as many as fit.

    Raises:
        ConfigError: the cluster is too small, or workers without a GPU have no number set.
    """
    room = sum(_room(node["Resources"], need) for node in nodes)
    count = asked_for
    if count is None and "GPU" not in need:
        raise ConfigError(
            "launcher.workers has no value, and the workers use no GPU: set their number, as in "
            "launcher.workers=2"
        )
    if count is None and room:
        return room
    if count is None or count > room:
        what = " and ".join(_amount(number, name) for name, number in need.items()) or "nothing"
        workers = "a worker" if count is None else f"{count} worker{'s' * (count != 1)}"
        described = "; ".join(_node(node) for node in nodes)
        raise ConfigError(
            f"launcher=ray: {workers} with {what} each do{'es' * (count in (None, 1))} not fit "
            f"this cluster, which has room for {room}: {described}. Lower launcher.workers, "
            "launcher.gpus_per_worker or launcher.cpus_per_worker, or add nodes"
        )
    return count


@contextmanager
def places(
    count: int, need: Need, strategy: str, heart: Heart
) -> Iterator[Callable[[int], dict[str, Any]]]:
    """Reserve resources for `count` workers. Yields a function that returns the options of the
    actor of a worker, by the worker's number; the resources are given back at the end."""
    amounts = {"num_cpus": need.get("CPU", 0), "num_gpus": need.get("GPU", 0)}
    if not need:  # Ray has no empty bundles
        yield lambda number: {**amounts, "scheduling_strategy": "SPREAD"}
        return
    group = placement_group([dict(need)] * count, strategy=strategy)

    def options(number: int) -> dict[str, Any]:
        chosen = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        return {**amounts, "scheduling_strategy": chosen}

    try:
        yield options
    finally:
        if not heart.is_gone():
            remove_placement_group(group)


def _room(resources: Need, need: Need) -> int:
    """How many workers a node has room for."""
    # 1e-6 makes up for rounding: three workers of 0.1 GPU fit into 0.3.
    fits = [int((resources.get(name, 0) + 1e-6) // number) for name, number in need.items()]
    return min(fits, default=1_000_000)  # workers that need nothing fit in any number


def _node(node: Mapping[str, Any]) -> str:
    amounts = (_amount(node["Resources"].get(name, 0), name) for name in _UNITS)
    return f"{node['NodeManagerHostname']} has {' and '.join(amounts)}"


def _amount(number: float, name: str) -> str:
    unit = _UNITS[name]
    return f"{number:g} {unit}{'s' * (number != 1)}" if number else f"no {unit}"
