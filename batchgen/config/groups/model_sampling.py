"""Reads the sampling options that a model recommends, from its generation_config.json.

With `sampling=model`, the keys of the group `sampling` are null, and the model's values replace
them: {"temperature": None} becomes {"temperature": 0.6}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen.util.errors import ConfigError
from batchgen.util.package_files import PACKAGE_SCHEME, find_in_package
from batchgen.util.paths import user_path

OFF: Mapping[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""The keys of the group `sampling` that may come from the model → the value that leaves its
distribution unchanged. The latter applies if the model's file lacks the key."""
_UNSUPPORTED: Mapping[str, Any] = {
    **{"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None},
    **{"encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "diversity_penalty": 0.0},
    **{"num_beams": 1, "num_beam_groups": 1, "penalty_alpha": None, "guidance_scale": None},
    **{"bad_words_ids": None, "force_words_ids": None, "sequence_bias": None},
    **{"suppress_tokens": None, "begin_suppress_tokens": None, "dola_layers": None},
    **{"forced_bos_token_id": None, "forced_eos_token_id": None},
    **{"exponential_decay_length_penalty": None, "watermarking_config": None},
}
"""Keys of such a file that decide tokens and that the engine does not support → the value that
changes nothing."""
_FILE = "generation_config.json"
_MOST_BYTES = 2**20


def recommended(folder: Path) -> dict[str, float]:
    """The values of the keys of OFF that the model in this folder recommends; empty if it
    recommends none.

    Raises:
        ConfigError: its file cannot be used.
    """
    return _recommended_values(_read(folder / _FILE))


def with_model_values(
    sampling: Mapping[str, Any], path: str, revision: str | None
) -> dict[str, Any]:
    """The keys of the group `sampling`, where values of the model `path` replace null.

    Raises:
        ConfigError: the model cannot be reached, recommends nothing, or recommends an option that
            the engine does not support.
    """
    unset = [key for key in OFF if key in sampling and sampling[key] is None]
    if not unset:
        return dict(sampling)
    content = _read(_file_of(path, revision))
    model_values = _recommended_values(content)
    if not model_values:
        raise ConfigError(
            f"sampling.{unset[0]} is null, which takes the model's value, and {path} recommends "
            f"none ({_FILE} has none, or is missing): set sampling=sample or sampling=greedy"
        )
    for key, neutral in _UNSUPPORTED.items():
        if content.get(key) not in (neutral, None):
            raise ConfigError(
                f"{path} recommends {key}={content[key]} ({_FILE}), which batchgen does not "
                "support: set the keys of sampling yourself, such as sampling=sample"
            )
    values = {**OFF, **model_values}
    return {**sampling, **{key: values[key] for key in unset}}


def sampling_values(
    sampling: Mapping[str, Any], recommended_values: Mapping[str, float]
) -> dict[str, dict[str, float | None]]:
    """The job's value of each key that a model may recommend, together with the model's value
    (None: no recommendation). Keys that change nothing and are not recommended are left out."""
    return {
        key: {"value": sampling[key], "model": recommended_values.get(key)}
        for key, off in OFF.items()
        if key == "temperature" or sampling[key] != off or recommended_values.get(key, off) != off
    }


def sampling_text(values: Mapping[str, Mapping[str, Any]]) -> str:
    """The values of `sampling_values` in one line, with their source."""
    parts = []
    for key, pair in values.items():
        text = f"{key}={pair['value']}"
        if pair["model"] is not None:
            is_same = pair["value"] == pair["model"]
            text += " (the model's)" if is_same else f" (the model recommends {pair['model']})"
        parts.append(text)
    return ", ".join(parts)


def recommendation(
    sampling: Mapping[str, Any], recommended_values: Mapping[str, float]
) -> str | None:
    """A remark on a job that does not sample as its model recommends; None if it does."""
    others = {key: value for key, value in recommended_values.items() if sampling[key] != value}
    if not others:
        return None
    model = ", ".join(f"{key}={value}" for key, value in others.items())
    job = ", ".join(f"{key}={sampling[key]}" for key in others)
    return f"the model recommends {model}; this job has {job} (sampling=model takes the model's)"


def _recommended_values(content: Mapping[str, Any]) -> dict[str, float]:
    """The values of OFF's keys in the content of a file.

    `do_sample`: false means greedy decoding. If it is true and the file sets nothing else, the
    model recommends sampling from its plain distribution.
    """
    if content.get("do_sample") is False:
        return {"temperature": 0.0}
    values = {}
    for key in OFF:
        if (value := content.get(key)) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{_FILE} of the model: {key} must be a number, got {value!r}")
        # A top_k of -1 is off in some files, as 0 is here.
        values[key] = max(value, 0) if key == "top_k" else float(value)
    if not values and content.get("do_sample") is True:
        values["temperature"] = 1.0
    return values


def _read(file: Path | None) -> dict[str, Any]:
    """The content of the file; empty if it does not exist."""
    if file is None or not file.is_file():
        return {}
    try:
        with file.open("rb") as source:
            content = json.loads(source.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold an object, as transformers writes it")
    return content


def _file_of(path: str, revision: str | None) -> Path | None:
    """The file of a model in a folder, in a package or on the hub; None if it does not exist."""
    if path.startswith(PACKAGE_SCHEME):
        return find_in_package(path, "model") / _FILE
    local = user_path(path, "model.path")
    if local.exists() or path.count("/") != 1:
        return local / _FILE
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(path, _FILE, revision=revision))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{_FILE} of {path} is not on this machine and the hub cannot be reached, and "
            "sampling=model needs it: check the network, or set sampling=sample"
        ) from error
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, ValueError) as error:
        raise ConfigError(f"{_FILE} of {path} cannot be read: {error}") from error
