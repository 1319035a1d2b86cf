"""Check the kernels in which ranks send each other tensors, with both ranks on one device.

One rank runs after the other. What the second sends lies in the inboxes of the first before that
runs, and what the first sends lies there for the second.
"""

from __future__ import annotations

import torch

from batchgen.kernels.parallel.add_sum_norm import add_sum_norm, add_sum_norm_reference
from batchgen.kernels.parallel.inbox import PeerMemory, as_bits, clear, memory_bytes
from batchgen.kernels.parallel.rank_gather import gather

_ROWS, _SIZE, _EPS = 3, 700, 1e-6
_INBOX = _ROWS * _SIZE * 4 // 16 * 16 + 16
_CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""How far the norm of a result may be from the reference's, in units of that."""


def check_ranks(device: torch.device) -> list[str]:
    """Compare sums with their norm and gathers with the references; returns the differences."""
    problems = []
    for dtype, bound in _CLOSE.items():
        generator = torch.Generator().manual_seed(0)
        stream, *parts = torch.randn(3, _ROWS, _SIZE, generator=generator).to(dtype)
        weight = torch.randn(_SIZE, generator=generator).to(dtype)
        normed, summed = add_sum_norm_reference(stream, parts, weight, _EPS)
        expected = {"sum": summed, "norm": normed, "gather": torch.cat(parts, 1)}

        memories = [
            torch.empty(memory_bytes(2, 2, _INBOX), dtype=torch.uint8, device=device) for _ in parts
        ]
        addresses = torch.tensor([memory.data_ptr() for memory in memories], device=device)
        peers = [PeerMemory(addresses, rank, 2, _INBOX) for rank in range(2)]
        for memory in memories:
            clear(memory)
        for lane in range(2):
            sent = as_bits(parts[1].to(device)).flatten()
            inbox = memories[0][peers[0].start(lane) + _INBOX :]
            inbox[: sent.numel() * sent.itemsize].view(sent.dtype).copy_(sent)
        for rank, part in enumerate(parts):
            own, residual = part.to(device), stream.to(device, copy=True)
            ours = add_sum_norm(residual, own, weight.to(device), _EPS, peers[rank], 0)
            found = {"sum": ours[1], "norm": ours[0], "gather": gather(own, peers[rank], 1)}
            for name, right in expected.items():
                error = float((found[name].cpu().float() - right.float()).norm() / right.norm())
                if not error < bound:
                    problems.append(f"rank {rank}, {dtype}, {name}: differs by {error:.2g}")
    return problems
