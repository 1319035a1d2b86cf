"""Exports answers token by token: top log-probabilities for distillation (`kd…`) and rollouts for
reinforcement learning (`rl`, and `trace_rl` for diffusion models). `batchgen export --to` uses
`TokenRows`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.pages.tokens.decode_tokens import job_decode
from batchgen.pipelines.publish.finished_rows import FinishedRows, LocatedRow, set_row_name
from batchgen.pipelines.publish.row_values import answered_rows, number_value
from batchgen.pipelines.publish.trainers.conversations import Conversations
from batchgen.pipelines.publish.trainers.trainer_rows import ExportRequest, Place
from batchgen.util.errors import ConfigError

TOKEN_FORMATS = ("kd", "kd-v1", "kd-packed", "rl", "trace_rl")
_IDS, _LOGPROBS, _PROMPT = "token_ids", "logprobs", "prompt_token_ids"
_TOP, _TOP_IDS, _REST = "top_logprobs", "top_logprob_ids", "answer_rest_probs"
_EXPERTS = "routed_experts"
_TRACE = ("step_map", "tail_token_ids", "tail_step_map")
_ROW = (("row_id", pa.string()), ("sample_index", pa.int32()))
_FLOATS = pa.list_(pa.float32())
_ENTRY = pa.struct([("token", pa.string()), ("logprob", pa.float32())])
_SCHEMAS: dict[str, list[tuple[str, pa.DataType]]] = {
    "kd": [
        (_LOGPROBS, pa.list_(_FLOATS)),
        ("target_token_ids", pa.list_(pa.list_(pa.int32()))),
    ],
    "kd-v1": [(_LOGPROBS, pa.list_(pa.list_(_ENTRY)))],
    "kd-packed": [
        *_ROW,
        (_PROMPT, pa.list_(pa.int32())),
        (_IDS, pa.list_(pa.int32())),
        ("top_k", pa.int32()),
        ("id_bits", pa.int32()),
        ("top_ids", pa.binary()),
        ("top_logprobs", pa.binary()),
        ("rest_probs", pa.binary()),
    ],
    "rl": [
        *_ROW,
        (_IDS, pa.list_(pa.int32())),
        ("mask", pa.list_(pa.bool_())),
        (_LOGPROBS, _FLOATS),
        ("temperatures", _FLOATS),
        ("reward", pa.float64()),
    ],
    # Two trainers read this format. dLLM-RL (train/rl_sdar.py at fda673ff of pixeli99/dLLM-RL)
    # reads prompt, response, reward and step_map, and uses the order of steps within a block. DARE
    # (verl/workers/rollout/cj_trajectory.py at 5f8e5f01 of yjyddq/DARE) reads the ids and steps
    # (from 1) up to the end of the last block, and how many of these belong to the response.
    "trace_rl": [
        *_ROW,
        ("prompt", pa.string()),
        ("response", pa.string()),
        (_PROMPT, pa.list_(pa.int32())),
        (_IDS, pa.list_(pa.int32())),
        ("step_map", pa.list_(pa.int32())),
        ("stop_length", pa.int32()),
        ("mask", pa.list_(pa.bool_())),
        (_LOGPROBS, _FLOATS),
        ("reward", pa.float64()),
    ],
}  # fmt: skip
_ROUTING = pa.struct(
    [("data", pa.binary()), ("shape", pa.list_(pa.int32())), ("dtype", pa.string())]
)


class TokenRows:
    """Yields the rows of one format, one for each answer, in order. If the job scored given
    answers, these are exported; otherwise the generated ones.

    Attributes:
        schema: the columns of the format.
        left_out: the number of rows left out, by reason; filled during the iteration.
        made_of: (shard, position) of the row from which the last exported row was made, in a list.
    """

    def __init__(self, rows: FinishedRows, request: ExportRequest) -> None:
        """Raise ConfigError if the rows lack a column that the format needs."""
        self._rows, self._to, self.left_out = rows, request.to, Counter[str]()
        self.made_of: list[Place] = []
        rows.refuse_set(f"--to {request.to}")
        names = rows.schema.names
        scored = "answer_token_ids" in names
        # The names of these columns of the answers: `answer_…` if they were scored.
        self._name = {n: f"answer_{n}" if scored else n for n in (_IDS, _LOGPROBS, _TOP, _TOP_IDS)}
        self._sampling = rows.group("sampling")
        self._experts = self._to == "rl" and _EXPERTS in names
        needed = [self._name[_IDS], *self._needed()]
        if missing := [name for name in needed if name not in names]:
            listed = sorted({name.replace("top_logprob_ids", "top_logprobs") for name in missing})
            columns = ",".join(name.removeprefix("answer_") for name in listed)
            raise ConfigError(
                f"--to {self._to} needs the column {missing[0]!r}, which {rows.user_path} does not "
                f"have: run the job with output.columns=[{columns}]"
            )
        more = [_REST] if _REST in names and self._to == "kd-packed" else []
        more += [_EXPERTS] if self._experts else []
        if self._to == "rl" and self._sampling.get("column") in names:
            more.append(self._sampling["column"])
        self._wanted = rows.columns.named(["row_id", "sample_index", "error", *needed, *more])
        self._where = self._expression("where", request.where)
        reward = request.by or ("mark" if "mark" in rows.columns.names else None)
        is_rollout = self._to in ("rl", "trace_rl")
        self._reward = self._expression("by", reward if is_rollout else None)
        self._decode = job_decode(rows.config) if self._to == "trace_rl" else None
        self._conversations: Conversations | None = None
        if self._to in ("kd", "kd-v1"):
            self._conversations = Conversations(rows, request.messages, None, answers=True)
            self._wanted |= self._conversations.wanted
        self.schema = self._schema()

    def _needed(self) -> list[str]:
        """Return the columns that the format needs besides the token ids."""
        if self._to == "rl":
            return [self._name[_LOGPROBS], _PROMPT]
        if self._to == "trace_rl":
            return [self._name[_LOGPROBS], _PROMPT, *_TRACE]
        top = [self._name[_TOP], self._name[_TOP_IDS]]
        return [*top, _PROMPT] if self._to == "kd-packed" else top

    def _expression(self, key: str, source: str | None) -> Any:
        """Parse the expression of an option, and add the columns that it reads to `_wanted`."""
        if source is None:
            return None
        expression = self._rows.columns.expression(f"--{key}", source)
        self._wanted |= self._rows.columns.read_by(expression)
        return expression

    def _schema(self) -> pa.Schema:
        columns = _SCHEMAS[self._to]
        if self._conversations is not None:
            columns = [*self._conversations.fields, *columns]
        if self._experts:
            columns = [*columns, (_EXPERTS, _ROUTING)]
        return pa.schema(columns)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows, with the columns of the schema. Raises ConfigError if a row cannot be
        made."""
        make = {
            **{"kd": self._kd, "kd-v1": self._kd, "kd-packed": self._packed},
            **{"rl": self._rl, "trace_rl": self._trace},
        }
        for row in answered_rows(self._rows, self._wanted, self._where, self.left_out):
            if row.variables[self._name[_IDS]]:
                self.made_of = [(row.shard, row.position)]
                yield make[self._to](row)
            else:
                self.left_out["without tokens"] += 1

    def _kd(self, row: LocatedRow) -> dict[str, Any]:
        """Return a row of `kd` or `kd-v1`: the conversation and the top log-probabilities."""
        assert self._conversations is not None
        columns = self._conversations.of(row).columns
        top, ids = row.variables[self._name[_TOP]], row.variables[self._name[_TOP_IDS]]
        if self._to == "kd":
            return columns | {_LOGPROBS: top, "target_token_ids": ids}
        entries = [
            [{"token": f"token_id:{i}", "logprob": p} for i, p in zip(*at_position, strict=True)]
            for at_position in zip(ids, top, strict=True)
        ]
        return columns | {_LOGPROBS: entries}

    def _packed(self, row: LocatedRow) -> dict[str, Any]:
        """Return a row of `kd-packed`: the top log-probabilities of N tokens as binary arrays."""
        values = row.variables
        top = np.array(values[self._name[_TOP]], np.float32)  # [N, top_k]
        ids = np.array(values[self._name[_TOP_IDS]], np.int64)  # [N, top_k]
        rest = values.get(_REST)
        if rest is None:
            rest = 1 - np.exp(top.astype(np.float64)).sum(1)
        bits = max(1, int(ids.max()).bit_length())
        return self._named(row) | {
            _PROMPT: values[_PROMPT],
            _IDS: values[self._name[_IDS]],
            "top_k": top.shape[1],
            "id_bits": bits,
            "top_ids": packed(ids, bits),
            "top_logprobs": _halves(top),
            "rest_probs": _halves(np.clip(rest, 0, 1)),
        }

    def _rl(self, row: LocatedRow) -> dict[str, Any]:
        """Return a row of `rl`. Lists cover prompt and answer; `mask` marks the answer."""
        values = row.variables
        prompt, answer = values[_PROMPT], values[self._name[_IDS]]
        temperature = self._temperature(row)
        columns = self._named(row) | {
            _IDS: [*prompt, *answer],
            "mask": [False] * len(prompt) + [True] * len(answer),
            _LOGPROBS: [0.0] * len(prompt) + values[self._name[_LOGPROBS]],
            "temperatures": [temperature] * (len(prompt) + len(answer)),
            "reward": self._earned(row),
        }
        if self._experts:
            kind = self._rows.schema.field(_EXPERTS).type
            while not pa.types.is_integer(kind):
                kind = kind.value_type
            routing = np.array(values[_EXPERTS], kind.to_pandas_dtype())
            if len(routing) != len(columns[_IDS]) - 1:
                raise ConfigError(
                    f"{set_row_name(row)}: {_EXPERTS} must have an entry for each token except "
                    "the last"
                )
            columns[_EXPERTS] = {
                "data": routing.tobytes(),
                "shape": list(routing.shape),
                "dtype": routing.dtype.name,
            }
        return columns

    def _trace(self, row: LocatedRow) -> dict[str, Any]:
        """Return a row of `trace_rl`: the answer, and the tail of its last block. The tail has the
        tokens after the end of the answer; their log-probabilities are unknown, written as 0 and
        masked."""
        values = row.variables
        prompt, answer = values[_PROMPT], values[self._name[_IDS]]
        steps, tail, tail_steps = (values[name] for name in _TRACE)
        return self._named(row) | {
            "prompt": None if self._decode is None else self._decode(prompt),
            "response": None if self._decode is None else self._decode(answer),
            _PROMPT: prompt,
            _IDS: [*answer, *tail],
            "step_map": [*steps, *tail_steps],
            "stop_length": len(answer),
            "mask": [True] * len(answer) + [False] * len(tail),
            _LOGPROBS: values[self._name[_LOGPROBS]] + [0.0] * len(tail),
            "reward": self._earned(row),
        }

    def _earned(self, row: LocatedRow) -> float | None:
        """Return the reward of a row; None without one."""
        return None if self._reward is None else number_value(self._reward, row)

    def _temperature(self, row: LocatedRow) -> float:
        """Return the temperature of a row. Options in a column of the data set override the
        job's."""
        row_options = row.variables.get(str(self._sampling.get("column"))) or {}
        temperature = row_options.get("temperature") if isinstance(row_options, Mapping) else None
        return float(self._sampling.get("temperature", 1.0) if temperature is None else temperature)

    def _named(self, row: LocatedRow) -> dict[str, Any]:
        return {name: row.variables[name] for name, _ in _ROW}


def packed(ids: npt.NDArray[np.int64], bits: int) -> bytes:
    """Pack token ids into `bits` bits each, the highest bit first."""
    whole = np.unpackbits(ids.astype(">u4").reshape(-1, 1).view(np.uint8), axis=1)
    return np.packbits(whole[:, 32 - bits :]).tobytes()


def _halves(values: npt.ArrayLike) -> bytes:
    """Return values as the bytes of little-endian float16, clipped to its range."""
    lowest, highest = np.finfo(np.float16).min, np.finfo(np.float16).max
    return np.clip(values, lowest, highest).astype("<f2").tobytes()
