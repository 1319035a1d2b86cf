"""Classifiers and bare decoders of tiny models, and what transformers makes of their rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from batchgen.engine.interface.hidden_columns import Pooling
from batchgen.engine.sampling.sampling_params import RequestParams
from tests.support.engine.engine_rows import Request

LABELS = ("bad", "so-so", 'good, "really"')


def read(
    prompt: Sequence[int], pooling: Pooling = "last", *columns: str, **options: Any
) -> Request:
    """A row that is read alone."""
    names = columns or ("embedding",)
    params = RequestParams(max_new_tokens=0, pooling=pooling, columns=names, **options)
    return list(prompt), params


def classifier_folder(folder: Path, out: Path, labels: Sequence[str] = LABELS) -> Path:
    """A classifier with the decoder of a saved model, as transformers saves it."""
    torch.manual_seed(7)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=len(labels), id2label=dict(enumerate(labels)), dtype=torch.float32
    )
    model.score.weight.data.normal_(0, 0.3)
    return _saved(model, out)


def bare_folder(folder: Path, out: Path) -> Path:
    """The decoder of a saved model without its head, as transformers saves it."""
    return _saved(AutoModel.from_pretrained(folder, dtype=torch.float32), out)


def _saved(model: PreTrainedModel, out: Path) -> Path:
    model.save_pretrained(out)
    return out


class Reference:
    """A classifier or bare decoder of transformers, in float32."""

    def __init__(self, folder: Path, *, classifies: bool) -> None:
        kind = AutoModelForSequenceClassification if classifies else AutoModel
        self._model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    @torch.inference_mode()
    def scores(self, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
        """[C], the logits of the classes."""
        found: npt.NDArray[np.float32] = self._model(torch.tensor([list(prompt)])).logits[0].numpy()
        return found

    @torch.inference_mode()
    def states(self, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
        """[layers + 1, tokens, hidden], as `output_hidden_states` gives them."""
        found = self._model(torch.tensor([list(prompt)]), output_hidden_states=True)
        return torch.stack([states[0] for states in found.hidden_states]).numpy()

    def embedding(self, request: Request) -> npt.NDArray[np.float32]:
        """[hidden], pooled as the request says."""
        prompt, params = request
        last = self.states(prompt)[-1].astype(np.float64)
        value = {"last": last[-1], "mean": last.mean(0), "cls": last[0]}[params.pooling or ""]
        if params.normalise:
            value = value / np.linalg.norm(value)
        return value.astype(np.float32)  # type: ignore[no-any-return]


def embedder_files(folder: Path, pooling: object, *more: str, place: str = "1_Pooling") -> Path:
    """Write the files of an embedder: `more` are modules behind its pooling."""
    folder.mkdir(exist_ok=True)
    modules = [("", "models.Transformer"), (place, "sentence_transformer.modules.pooling.Pooling")]
    modules += [(f"{i}_{kind}", f"models.{kind}") for i, kind in enumerate(more, 2)]
    listed = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder
