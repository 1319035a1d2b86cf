"""The weights of nano_hybrid that come with batchgen."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import measure_nano_hybrid
import pytest
import torch
from nano_batch import encode
from nano_hybrid import load
from nano_problems import held_out_set
from nano_tokenizer import build_tokenizer
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import batchgen

DATA = Path(batchgen.__file__).parent / "data"
FOLDER = DATA / "nano_hybrid"


def test_it_measures_as_it_should(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure_nano_hybrid, "FORMS", ("plain",))
    monkeypatch.setattr(sys, "argv", ["measure", str(FOLDER), "--rows", "1"])
    measure_nano_hybrid.main()
    line = capsys.readouterr().out
    assert line.startswith("plain: ") and "accuracy 1.000" in line
    found = re.search(r"tokens/step ([\d.]+)", line)
    assert found is not None and float(found[1]) >= 2.4


def test_transformers_reads_it() -> None:
    main = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert tokenizer.chat_template == build_tokenizer().chat_template
    batch = encode(held_out_set(2, 0), "plain", tokenizer)
    model = load(FOLDER)
    with torch.inference_mode():
        hidden, _ = model(batch.ids, torch.ones(batch.ids.shape))
        logits, expected = model.logits(hidden), main(batch.ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_its_folder_is_complete_and_small() -> None:
    # Both nano models hold the same problems out, so that dataset=nano_eval is for both.
    for name in ("eval.jsonl", "answer_schema.json", "tokenizer.json", "chat_template.jinja"):
        assert (FOLDER / name).read_bytes() == (DATA / "nano_sdar" / name).read_bytes()
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 12e6
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert names == set(load(FOLDER).state_dict())
    assert {"mtp.fc.weight", "mtp.layers.0.mlp.experts.gate_up_proj"} < names
