"""Layers with a window and the others share the memory of pages, and each page is theirs alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.caches.cache_specs import KVSpec, PlaneSpec
from batchgen.engine.caches.model_caches import CacheSizes, ModelCaches, model_page_bytes
from batchgen.engine.caches.page_layout import PageLayout
from batchgen.engine.caches.page_needs import PageNeeds
from batchgen.kernels.attention.kv_cache import KVCache

CPU = torch.device("cpu")
SPECS: dict[str, list[KVSpec | PlaneSpec | None]] = {
    "equal": [KVSpec(4, 2, 8, 16), KVSpec(4, 2, 8)] * 2,
    "few full ones": [KVSpec(4, 2, 8, None if i % 6 == 5 else 16) for i in range(17)],
    "larger full heads": [
        KVSpec(4, 1, 16) if i % 6 == 5 else KVSpec(4, 4, 8, 16) for i in range(12)
    ],
    "larger window heads": [KVSpec(4, 2, 16, 16), KVSpec(4, 2, 8), KVSpec(4, 2, 8), None],
    "windows only": [KVSpec(4, 2, 8, 16)] * 2,
    "other shapes too": [KVSpec(4, 2, 8, 16), KVSpec(4, 2, 8), KVSpec(4, 1, 12), PlaneSpec((3,))],
}


def in_fp8(spec: KVSpec | PlaneSpec | None) -> KVSpec | PlaneSpec | None:
    if not isinstance(spec, KVSpec):
        return spec
    return KVSpec(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.window, in_fp8=True)


@given(
    kind=st.sampled_from(sorted(SPECS)),
    fp8=st.booleans(),
    blocks=st.sampled_from([(1, 1), (2, 1), (1, 2)]),
    runs=st.integers(1, 6),
    pages=st.integers(2, 5),
    data=st.data(),
)
def test_what_is_written_to_a_page_is_seen_in_no_other(
    kind: str, fp8: bool, blocks: tuple[int, int], runs: int, pages: int, data: st.DataObject
) -> None:
    specs = [in_fp8(spec) for spec in SPECS[kind]] if fp8 else SPECS[kind]
    layout = PageLayout(pages, *blocks, runs)
    sizes = CacheSizes(layout.num_blocks, 4, 0, layout=layout)
    caches = ModelCaches.allocate(specs, (), sizes, width=1, dtype=torch.bfloat16, device=CPU)
    planes: list[tuple[bool, torch.Tensor]] = []  # bytes of each block: [N, ...]
    for spec, layer in zip(specs, caches.layers, strict=True):
        parts = list(layer) if isinstance(layer, KVCache) else [layer]
        windowed = isinstance(spec, KVSpec) and spec.window is not None
        for part in parts:
            if isinstance(part, torch.Tensor):
                of_blocks = part.transpose(0, 1) if isinstance(layer, KVCache) else part
                assert part.is_contiguous() and not part.view(torch.uint8).any()
                planes.append((windowed, of_blocks.view(torch.uint8)))
    for windowed, plane in planes:
        assert len(plane) == (layout.num_window_blocks if windowed else layout.num_blocks)
    written = data.draw(st.integers(0, pages - 1))
    windows = data.draw(st.booleans())
    for number, (windowed, plane) in enumerate(planes, 1):
        for block in blocks_of(layout, written, windowed) if windowed == windows else ():
            plane[block] = number
    for number, (windowed, plane) in enumerate(planes, 1):
        for page in range(pages):
            for block in blocks_of(layout, page, windowed):
                if page != written:
                    assert not plane[block].any(), "a page has memory of another one"
                elif windowed == windows:
                    assert (plane[block] == number).all(), "two layers of one kind share memory"


def blocks_of(layout: PageLayout, page: int, windowed: bool) -> list[int]:
    if windowed:
        first = page * layout.window_blocks
        return list(range(first, first + layout.window_blocks))
    blocks = [layout.full_block(page, index) for index in range(layout.full_blocks)]
    assert [layout.page_of_full(block) for block in blocks] == [
        (page, i) for i in range(len(blocks))
    ]
    return blocks


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", sorted(SPECS))
def test_the_bytes_of_a_page_are_those_that_are_allocated(kind: str, fp8: bool) -> None:
    specs = [in_fp8(spec) for spec in SPECS[kind]] if fp8 else SPECS[kind]
    layout = PageLayout(3, 2, 1, 2)
    sizes = CacheSizes(layout.num_blocks, 4, 0, layout=layout)
    caches = ModelCaches.allocate(specs, (), sizes, width=1, dtype=torch.bfloat16, device=CPU)
    storages = {}
    for layer in caches.layers:
        for part in layer if isinstance(layer, KVCache) else [layer]:
            if isinstance(part, torch.Tensor):
                storage = part.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    assert sum(storages.values()) == 3 * model_page_bytes(specs, (), layout, 4, torch.bfloat16)


@given(
    layout=st.builds(
        PageLayout, st.integers(2, 90), st.integers(1, 3), st.integers(1, 2), st.integers(1, 12)
    ),
    window=st.integers(1, 60),
    tokens=st.integers(1, 400),
)
def test_pages_are_counted_alike_one_by_one_and_together(
    layout: PageLayout, window: int, tokens: int
) -> None:
    needs = PageNeeds(layout, 4, window, -(-(window + 4) // 4))
    blocks = -(-tokens // 4)
    own = -(-min(blocks, needs.row_blocks) // layout.window_blocks)
    assert own <= needs.windows(tokens) <= own + 1
    assert needs.full(tokens) == -(-blocks // layout.full_blocks)
    assert (needs.of_row(tokens) <= needs.usable) == (blocks * 4 <= needs.capacity)
    assert PageNeeds(layout, 4).windows(tokens) == 0
