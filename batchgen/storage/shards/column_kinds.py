"""Facts about output columns that follow from their names. Importing this loads no pyarrow."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

PROMPT_IMAGES = "prompt_images"
"""The column that lists the images of a row's prompt."""
_WITHOUT_SCOPE = ("token_ids", "prompt_token_ids")  # per token, without that metadata


def is_per_token(field: pa.Field) -> bool:
    """Whether a column has a value per token, or per choice, and not one per row."""
    scope = (field.metadata or {}).get(b"scope", b"row")
    return scope != b"row" or field.name in _WITHOUT_SCOPE
