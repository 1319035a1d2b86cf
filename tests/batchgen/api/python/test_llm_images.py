"""Prompts with images in the Python interface, with a tiny random model of Qwen3-VL's form."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from batchgen import LLM, SamplingParams
from tests.support.jobs.image_job import IMAGE_ID, picture

PARAMS = SamplingParams(max_tokens=4, temperature=0, logprobs=0)
FILE = picture(64, 32)
PATCHES = 2


@pytest.fixture(scope="module")
def llm(vl_model: Path) -> Iterator[LLM]:
    with LLM(str(vl_model), device="cpu", kv_cache_gib=0.01, max_num_seqs=8) as llm:
        yield llm


def asked(*images: dict[str, Any], text: str = "1") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def test_an_image_may_be_given_in_any_form(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.png"
    path.write_bytes(FILE)
    monkeypatch.chdir(tmp_path)
    forms: list[Any] = [
        FILE, path, str(path), "own.png", f"file://{path}", Pillow.open(io.BytesIO(FILE)),
        f"data:image/png;base64,{base64.b64encode(FILE).decode()}", {"bytes": FILE, "path": None},
    ]  # fmt: skip
    (known,) = llm.generate(asked({"type": "image", "image": FILE}), PARAMS)
    assert known.error is None and known.prompt_token_ids.count(IMAGE_ID) == PATCHES
    prompts: list[Any] = [asked({"type": "image", "image": form}) for form in forms]
    prompts.append(asked({"type": "image_url", "image_url": {"url": forms[-2]}}))
    unfolded, before = [], None
    for token in known.prompt_token_ids:  # one token for each image, as a template writes it
        unfolded += [] if token == before == IMAGE_ID else [token]
        before = token
    for form in (FILE, [path]):
        wrapped = {"prompt_token_ids": unfolded, "multi_modal_data": {"image": form}}
        prompts.append(wrapped)
    for (output,) in llm.generate(prompts, PARAMS):
        assert output.prompt_token_ids == known.prompt_token_ids
        assert output.token_ids == known.token_ids
        np.testing.assert_array_equal(output.logprobs, known.logprobs)


def test_images_and_texts_mix_and_samples_and_scores_see_the_picture(llm: LLM) -> None:
    other = asked({"type": "image", "image": picture(64, 32, seed=1)})
    two = asked({"type": "image", "image": FILE}, {"type": "image", "image": picture(32, 32)})
    first = asked({"type": "image", "image": FILE})
    plain = asked()
    prompts = [first, other, two, plain]
    outputs = llm.generate(prompts, PARAMS, n=2)
    marks = [samples[0].prompt_token_ids.count(IMAGE_ID) for samples in outputs]
    assert marks == [PATCHES, PATCHES, PATCHES + 1, 0]
    for prompt, samples in zip(prompts, outputs, strict=True):
        alone = llm.generate(prompt, PARAMS)[0]
        assert samples[0].prompt_token_ids == alone.prompt_token_ids
        assert len(samples) == 2 and all(output.error is None for output in samples)
    scores = [llm.score(prompt, [1, 2, 3]) for prompt in prompts]
    assert len({score.logprob for score in scores}) == 4, "the picture does not matter"
    again = llm.score(prompts, [[1, 2, 3]] * 4)
    np.testing.assert_allclose([s.logprob for s in again], [s.logprob for s in scores], rtol=1e-5)


def test_a_bad_image_is_an_error_of_its_prompt(llm: LLM) -> None:
    bad: dict[str, Any] = {
        "bad_image": b"no image", "image_url": "https://example.com/a.png",
        "image_not_found": "/no/such/file.png",
    }  # fmt: skip
    prompts = [asked({"type": "image", "image": each}) for each in bad.values()]
    prompts.append(asked({"type": "image", "image": FILE}))
    outputs = [output for (output,) in llm.generate(prompts, PARAMS)]
    assert [output.error and output.error.type for output in outputs] == [*bad, None]
    (floats,) = llm.generate(asked({"type": "image", "image": Pillow.new("F", (32, 32))}), PARAMS)
    assert floats.error is not None and floats.error.type == "bad_image"


def test_who_reads_no_images_says_so(vl_model: Path, model: Path) -> None:
    wrapped = {"prompt_token_ids": [IMAGE_ID], "multi_modal_data": {"image": FILE}}
    with LLM(str(vl_model), device="cpu", kv_cache_gib=0.01, images=False) as blind:
        part, beside = blind.generate([asked({"type": "image", "image": FILE}), wrapped], PARAMS)
        (text,) = blind.generate([{"role": "user", "content": "1"}], PARAMS)
    assert part[0].error is not None and "only text is read" in str(part[0].error)
    assert beside[0].error is not None and "images=True" in str(beside[0].error)
    assert text.error is None
    with pytest.raises(ValueError, match="max_pixels=5 is less than one token"):
        LLM(str(vl_model), device="cpu", max_pixels=5)
