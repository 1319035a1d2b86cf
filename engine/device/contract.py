"""What the bits of a row's results depend on, besides the row, the model and the options.

With the setting `deterministic`, a row has the same bits in every batch. They may still differ
between kinds of GPUs, dtypes, library versions and versions of batchgen's source files. `contract`
lists all of these. A job stores the list with its results, so that a later run can tell whether it
can reproduce the bits. `engine_recipe.py` calls this module.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from pathlib import Path

import torch
import triton

from batchgen.kernels import rules

_SOURCES = ("kernels", "engine/layers", "engine/models")
"""The folders whose files compute rows, relative to the package's root."""
_MEASURED = 9
"""The compute capability of the GPUs on which equal bits were verified."""


def contract(device: torch.device, dtype: torch.dtype, ranks: int) -> dict[str, str]:
    """Return the facts that decide the bits of rows computed on this device, by name. With equal
    contracts and `deterministic`, a row has the same bits."""
    facts = {
        "rules": str(rules.VERSION),
        "sources": sources_digest(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "ranks": str(ranks),
        "device": device.type,
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["cuda"] = str(torch.version.cuda)
    return facts


@cache
def sources_digest() -> str:
    """Return a digest of the files that compute rows."""
    root, digest = Path(rules.__file__).resolve().parent.parent, blake2b(digest_size=8)
    for folder in _SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def check_deterministic(
    device: torch.device, dtype: torch.dtype, ranks: int, *, peer_access: bool, rejection: bool
) -> None:
    """Raise ValueError if the setting `deterministic` is on, but a row would not keep its bits.

    Args:
        peer_access: whether all ranks' GPUs can write each other's memory.
        rejection: whether drafts are verified by rejection sampling, so that tokens depend on the
            drafts.
    """
    if device.type != "cuda":
        return
    why = None
    if torch.cuda.get_device_capability(device)[0] != _MEASURED:
        name = torch.cuda.get_device_name(device)
        why = f"this GPU is a {name}, and equal bits were only verified on Hopper GPUs (H100, H200)"
    elif dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        why = f"the model's dtype is {name}, and equal bits were only verified in bfloat16"
    elif ranks > 1 and not peer_access:
        why = (
            f"tensor_parallel is {ranks}, and these GPUs cannot write each other's memory, so that "
            "NCCL adds up what they have, in an order of its own"
        )
    elif rejection:
        why = "drafts are verified by rejection, so tokens depend on which drafts were proposed"
    if why is not None:
        raise ValueError(
            f"deterministic is true, but cannot be guaranteed: {why}; set deterministic to false"
        )
