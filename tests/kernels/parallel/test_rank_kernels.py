"""What ranks send each other in the middle of a kernel, in processes whose memories are shared.

The kernels run on the CPU, in a process for each rank, as they run on a GPU for each.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.kernels.layers.rms_norm import rms_norm_reference
from batchgen.kernels.parallel.add_sum_norm import add_sum_norm, add_sum_norm_reference
from batchgen.kernels.parallel.inbox import (
    PeerMemory,
    as_bits,
    clear,
    empty_bits,
    memory_bytes,
)
from batchgen.kernels.parallel.rank_gather import gather

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
in_processes = pytest.mark.skipif(DEVICE != "cpu", reason="kernels are not interpreted here")
EPS = 1e-6
INBOX, LANES = 2**14, 3
"""The bytes of an inbox, into which four rows of the longest fit, and the lanes, of which the last
one is the spare."""
SHAPES = ((1, 64), (3, 700), (13, 1000), (1, 1), (6, 40))
DTYPES = (torch.float32, torch.bfloat16)
ROUNDS = list(itertools.product(DTYPES, range(len(SHAPES))))
"""What is sent one round behind the other: the dtype, and the index of the shape."""


def operands(rank: int, round_: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + round_)
    made = torch.randn(SHAPES[round_], generator=generator).to(dtype)
    # What means an empty place of an inbox is sent like any other value.
    as_bits(made).flatten()[:: 7 + round_] = empty_bits(made)
    return made


def residual(round_: int, dtype: torch.dtype) -> Tensor | None:
    """The residual stream; every other sum has none."""
    return operands(99, round_, dtype) if round_ % 2 else None


def norm_weight(round_: int, dtype: torch.dtype) -> Tensor:
    """Partial sums in the dtype of the stream, or in float32."""
    return operands(98, round_, torch.float32 if round_ % 2 else dtype)[0].contiguous()


def shared_memories(size: int, device: str = "cpu") -> list[Tensor]:
    """The memory of each rank, with empty inboxes."""
    memories = []
    for _ in range(size):
        memories.append(torch.empty(memory_bytes(LANES, size, INBOX), dtype=torch.uint8))
        memories[-1] = memories[-1].to(device)
        clear(memories[-1])
    return memories


def peers_of(rank: int, memories: list[Tensor]) -> PeerMemory:
    addresses = torch.tensor([memory.data_ptr() for memory in memories])
    return PeerMemory(addresses.to(memories[0].device), rank, len(memories), INBOX, LANES - 1)


def assert_empty(memories: list[Tensor]) -> None:
    for memory in memories:
        bits = memory.view(torch.int16)
        assert bool((bits == empty_bits(bits)).all()), "something was not read"


def assert_close(found: Tensor, expected: Tensor, steps: int = 1) -> None:
    # The interpreter does not round to bfloat16, but cuts digits off.
    eps = torch.finfo(expected.dtype).eps * steps
    torch.testing.assert_close(found.cpu().float(), expected.float(), rtol=eps, atol=eps)


def run_ranks(size: int, work: Callable[[PeerMemory], Any]) -> list[Any]:
    """Return what `work` returns in the process of each rank, which share their memories."""
    context = multiprocessing.get_context("fork")
    memories = shared_memories(size)
    for memory in memories:
        memory.share_memory_()

    def be_rank(rank: int, results: Connection[Any, Any]) -> None:
        torch.set_num_threads(1)
        results.send(work(peers_of(rank, memories)))

    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=be_rank, args=(rank, pipes[rank][1]), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    results = []
    for ours, _ in pipes:
        assert ours.poll(120)
        results.append(ours.recv())
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert_empty(memories)
    return results


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs have several rows or chunks."""
    monkeypatch.setattr("batchgen.kernels.parallel.add_sum_norm.MOST_PROGRAMS", 2)
    monkeypatch.setattr("batchgen.kernels.parallel.rank_gather.MOST_PROGRAMS", 2)
    monkeypatch.setattr("batchgen.kernels.parallel.rank_gather._BLOCK", 256)


@pytest.mark.quick(1)
@in_processes
@pytest.mark.parametrize(("size", "hop_bytes"), [(2, 0), (3, 10**9), (3, 0), (4, 0)])
def test_all_ranks_have_the_sum_of_all_and_its_norm(
    size: int, hop_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sum behind the other, in lanes that take turns, without waiting but in the kernel; in one
    shot, or in two where ranks have a row each. Sums of the longest rows take several launches."""
    monkeypatch.setattr("batchgen.kernels.parallel.add_sum_norm._HOP_BYTES", hop_bytes)

    def work(peers: PeerMemory) -> list[Any]:
        found = []
        for dtype, round_ in ROUNDS:
            own, weight = operands(peers.rank, round_, dtype), norm_weight(round_, dtype)
            pair = add_sum_norm(residual(round_, dtype), own, weight, EPS, peers, round_ % 2)
            found.append([x.float().numpy() for x in pair])
        return found

    for (dtype, round_), *found in zip(ROUNDS, *run_ranks(size, work), strict=True):
        parts = [operands(rank, round_, dtype) for rank in range(size)]
        weight = norm_weight(round_, dtype)
        _, stream = add_sum_norm_reference(residual(round_, dtype), parts, weight, EPS)
        ours = [torch.from_numpy(x) for x in found[0]]
        assert_close(ours[1].to(dtype), stream)
        # The norm of a stream that was rounded like ours.
        normed = rms_norm_reference(ours[1].to(dtype), weight, EPS)
        assert_close(ours[0].to(dtype), normed, 8)
        for of_rank in found:
            for x, expected in zip(of_rank, ours, strict=True):
                assert torch.equal(as_bits(torch.from_numpy(x)), as_bits(expected))


@pytest.mark.thorough
@in_processes
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_have_the_columns_of_all(size: int) -> None:
    def work(peers: PeerMemory) -> list[Any]:
        return [
            gather(operands(peers.rank, round_, dtype), peers, round_ % 2).float().numpy()
            for dtype, round_ in ROUNDS
        ]

    for (dtype, round_), *found in zip(ROUNDS, *run_ranks(size, work), strict=True):
        parts = [operands(rank, round_, dtype) for rank in range(size)]
        expected = torch.cat(parts, 1).float()
        for of_rank in found:
            torch.testing.assert_close(torch.from_numpy(of_rank), expected, rtol=0, atol=1e-40)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rank_after_the_other(dtype: torch.dtype) -> None:
    """What rank 1 sends is there before rank 0 runs, which then leaves what rank 1 needs."""
    for round_ in (0, 1, 3, 4):  # the other shape takes several launches
        memories = shared_memories(2, DEVICE)
        parts = [operands(rank, round_, dtype).to(DEVICE) for rank in range(2)]
        weight = norm_weight(round_, dtype).to(DEVICE)
        stream = residual(round_, dtype)
        for lane in range(2):
            sent = as_bits(parts[1]).flatten()
            sent = sent.masked_fill(sent == empty_bits(parts[1]), 0)
            start = peers_of(0, memories).start(lane) + INBOX
            size = sent.numel() * sent.itemsize
            memories[0][start : start + size].view(sent.dtype).copy_(sent)
        expected = add_sum_norm_reference(stream, [part.cpu() for part in parts], weight.cpu(), EPS)
        for rank in range(2):
            peers, own = peers_of(rank, memories), parts[rank]
            start_from = None if stream is None else stream.clone().to(DEVICE)
            normed, summed = add_sum_norm(start_from, own.clone(), weight, EPS, peers, 1)
            gathered = gather(own, peers, 0)
            assert_empty(memories[rank : rank + 1])
            assert_close(summed, expected[1])
            assert_close(normed, expected[0], 16)
            torch.testing.assert_close(
                gathered.float(), torch.cat(parts, 1).float(), rtol=0, atol=1e-40
            )


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", range(3))
def test_one_rank_in_two_shots(
    rank: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the others send this rank is there before it runs: their parts of its rows, and the sums
    of theirs. It leaves its parts of their rows and the sums of its own with them."""
    monkeypatch.setattr("batchgen.kernels.parallel.add_sum_norm._HOP_BYTES", 0)
    size, round_ = 3, 4
    memories = shared_memories(size, DEVICE)
    parts = [operands(peer, round_, dtype) for peer in range(size)]
    stream, weight = operands(99, round_, dtype), norm_weight(round_, dtype)
    normed, summed = add_sum_norm_reference(stream, parts, weight, EPS)

    def inbox(of: int, sender: int, half: int, like: Tensor) -> Tensor:
        start = peers_of(of, memories).start(1) + sender * INBOX + half * INBOX // 2
        values = memories[of][start : start + like.numel() * like.itemsize].view(like.dtype)
        return values.view(like.shape)

    def sent(x: Tensor) -> Tensor:
        bits = as_bits(x.contiguous())
        return bits.masked_fill(bits == empty_bits(x), 0).view(x.dtype).to(DEVICE)

    others = [peer for peer in range(size) if peer != rank]
    for peer in others:
        inbox(rank, peer, 0, parts[peer][rank::size]).copy_(sent(parts[peer][rank::size]))
        inbox(rank, peer, 1, summed[peer::size]).copy_(sent(summed[peer::size]))
    peers, own = peers_of(rank, memories), parts[rank].to(DEVICE)
    found = add_sum_norm(stream.to(DEVICE), own, weight.to(DEVICE), EPS, peers, 1)
    assert_empty(memories[rank : rank + 1])
    assert_close(found[1], summed)
    assert_close(found[0], normed, 16)
    for peer in others:
        part, total = parts[rank][peer::size], found[1][rank::size]
        assert torch.equal(as_bits(inbox(peer, rank, 0, part)), as_bits(sent(part)))
        assert torch.equal(as_bits(inbox(peer, rank, 1, total)), as_bits(sent(total)))
