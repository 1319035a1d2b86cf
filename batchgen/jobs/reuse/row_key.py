"""The key of a row: a digest of everything that decides its tokens.

Rows with equal keys have equal tokens, so `row_reuse.py` copies them from older jobs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from batchgen.config.compose.config_identity import config_identity
from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.interface.trajectory import Trajectory, answer_ids
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.inputs.prompts.row_request import RowRequest
from batchgen.storage.stores.manifest import OF_ADAPTER, OF_ADAPTERS

KEY_BYTES = 16
"""The length of a key."""
_ONLY_COLUMNS = ("logprobs", "top_logprobs", "columns")
"""Parameters that only choose output columns. They are not part of a key, because the schema says
which columns a row has."""
_FIRST = frozenset(
    (
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids"),
        *("ignore_eos", "seed", "logprobs_mode", "constraint"),
    )
)
"""Parameters that are in every key, as in version 0.1.0. All other parameters are in a key only if
they differ from their default, so that keys of older versions stay valid. This set never grows."""
_DEFAULTS = asdict(RequestParams())
_OF_ROWS = ("version of ", "rows[")
"""The beginnings of the names of fingerprints of row steps. These steps decide which prompts there
are, and a key contains the prompt itself."""


class RowKeys:
    """Makes the keys of a job's rows.

    Rows of two jobs with equal keys have the same tokens, text, counts and values per token, in the
    columns that both jobs write.
    """

    def __init__(
        self, config: JobConfig, fingerprints: Mapping[str, str], max_model_len: int
    ) -> None:
        """Digest everything that all rows share; `fingerprints` are those of `ResolvedJob`."""
        models = [name for name in fingerprints if name.endswith("_model")]
        groups, output = config_identity(config, models), config.output
        deciding = {
            name: text for name, text in fingerprints.items() if not name.startswith(_OF_ROWS)
        }
        # The parameters of a row contain its constraint, so it is no part of what rows share.
        deciding.pop("constraint", None)
        # The parameters name the adapter, and `key` puts the digest of its files in place of the
        # name.
        self._adapter = deciding.pop(OF_ADAPTER, None)
        start = f"{OF_ADAPTER} "
        adapter_names = [name for name in deciding if name.startswith(start)]
        self._adapters = {name.removeprefix(start): deciding.pop(name) for name in adapter_names}
        deciding.pop(OF_ADAPTERS, None)
        for key in ("lora_column", "lora_grid"):
            groups["model"].pop(key, None)
        shared = [
            groups["model"],
            groups["strategy"],
            max_model_len,
            deciding,
            [output.reasoning_start, output.reasoning_end, config.scores_choices],
            *(["whole_text"] if output.whole_text else []),
            *([{"hidden_layers": list(output.hidden_layers)}] if output.hidden_layers else []),
        ]
        if engine := {key: v for key, v in groups["engine"].items() if key != "max_model_len"}:
            shared.append({"engine": engine})
        text = json.dumps(shared, sort_keys=True, ensure_ascii=False)
        self._shared = blake2b(text.encode(), digest_size=KEY_BYTES).digest()

    def key(self, request: RowRequest) -> bytes:
        """The key of a request whose parameters have the seed of the row's sample."""
        prompt, params, answer, choices, images = request
        digest = blake2b(self._shared, digest_size=KEY_BYTES)
        lora = self._adapter if params.lora is None else self._adapters.get(params.lora)
        digest.update(_params_digest(replace(params, seed=0, lora=lora)))
        digest.update((params.seed % 2**64).to_bytes(8, "little"))
        # Lengths are digested too, so that the boundaries between lists count.
        lists = [] if answer is None else [answer_ids(answer)]
        if isinstance(answer, Trajectory):
            lists += [answer.all_token_ids, answer.all_steps]
            lists.append([answer.tail_token_ids is None, answer.same_distribution])
        for ids in (prompt, *lists, *choices):
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(np.asarray(ids, np.int64).tobytes())
        digest.update(bytes([answer is not None]))
        for row_image in images:
            digest.update(row_image.image.digest)
        return digest.digest()


@lru_cache(maxsize=1024)
def _params_digest(params: RequestParams) -> bytes:
    """A digest of parameters without their seed."""
    values = {
        name: value
        for name, value in asdict(params).items()
        if name not in _ONLY_COLUMNS and (name in _FIRST or value != _DEFAULTS[name])
    }
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()
