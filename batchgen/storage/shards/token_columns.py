"""Which columns of a shard have a value per token."""

from __future__ import annotations

import pyarrow as pa

_WITHOUT_SCOPE = ("token_ids", "prompt_token_ids")


def is_per_token(field: pa.Field) -> bool:
    """Whether the column has a value per token, or per choice, instead of one per row."""
    scope = (field.metadata or {}).get(b"scope", b"row")
    return scope != b"row" or field.name in _WITHOUT_SCOPE
