"""Rebuilds the prompt and the answer of a finished row, as messages or as plain texts. The trainer
formats of `batchgen export --to` use `Conversations`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchgen.evals.grades.visible_columns import Wanted
from batchgen.pipelines.publish.finished_rows import FinishedRows, LocatedRow, set_row_name
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names
from batchgen.util.templates.row_templates import RowTemplate
from batchgen.util.templates.used_columns import used_columns
from batchgen.util.text.plain_yaml import load_yaml

Message = dict[str, Any]
_ASSISTANT = "assistant"
_SHAREGPT_ROLES = {"human": "user", "gpt": _ASSISTANT}
_GIVE = (
    "give the messages, such as "
    """--messages '[{user: "{{ question }}"}, {assistant: "{{ %s }}"}]'"""
)


@dataclass(frozen=True)
class Exchange:
    """A prompt and its answer: two lists of messages or, for a plain text prompt, two texts."""

    prompt: list[Message] | str
    answer: list[Message] | str

    @property
    def columns(self) -> dict[str, Any]:
        """The values of the columns `Conversations.fields`."""
        if isinstance(self.prompt, list) and isinstance(self.answer, list):
            return {"messages": [*self.prompt, *self.answer]}
        return {"prompt": self.prompt, "completion": self.answer}


class Conversations:
    """Rebuilds the conversation of each row. The messages come from templates that the user gives,
    or from the prompt in the job's configuration followed by the generated text.

    Attributes:
        wanted: the columns that are read.
        are_messages: whether prompts are messages; False for plain text.
    """

    def __init__(
        self, rows: FinishedRows, messages: str | None, reasoning: str | None, *, answers: bool
    ) -> None:
        """Prepare the templates.

        Args:
            messages: YAML: a list of mappings from one role to its template, the last the
                assistant's; None to use the job's prompt.
            reasoning: the column that becomes `reasoning_content` of the last message.
            answers: whether the answers are exported, or only the prompts.

        Raises:
            ConfigError: the messages cannot be made from the columns of the rows.
        """
        self._rows, self._columns = rows, rows.columns
        self._text = rows.text_column
        prompt = rows.group("prompt")
        parsed = None if messages is None else _parsed(messages)
        self._column: list[str] = []  # the path of the messages in the rows; empty: no column
        self._continues = False  # whether the answer continues the prompt's last message
        self._given_answer: RowTemplate | None = None  # None: the answer is the generated text
        if parsed is not None:
            turns = parsed  # (role, template)
            last_role, _ = turns[-1]
            if answers and last_role != _ASSISTANT:
                raise ConfigError("--messages must end with the assistant's, which is the answer")
        else:
            turns = self._of_job(prompt)
        key = "--messages" if parsed is not None else "prompt"
        self.are_messages = parsed is not None or prompt.get("kind") in ("chat", "openai")
        self._turns = [(role, self._template(f"{key}.{role}", text)) for role, text in turns]
        # A job that generates nothing, such as a reward model's, has the answer in its prompt.
        is_in_prompt = answers and rows.group("sampling").get("max_new_tokens") == 0
        if (parsed is not None or is_in_prompt) and turns[-1][0] == _ASSISTANT:
            self._given_answer = self._turns.pop()[1]
        elif parsed is None and answers and prompt.get("answer") is not None:  # a scored answer
            turns = [*turns, (_ASSISTANT, str(prompt["answer"]))]
            self._given_answer = self._template("prompt.answer", turns[-1][1])
        if reasoning is not None and reasoning not in self._columns.names:
            raise ConfigError(
                f"--reasoning: {rows.user_path} has no column {reasoning!r}: choose among "
                f"{some_names(self._columns.names, reasoning)}"
            )
        self._reasoning = reasoning
        self.wanted = self._wanted([text for _, text in turns])

    @property
    def kind(self) -> pa.DataType:
        """The Arrow type of a prompt, which is also that of an answer."""
        if not self.are_messages:
            return pa.string()
        keys = ["role", "content", *(["reasoning_content"] if self._reasoning else [])]
        return pa.list_(pa.struct([(key, pa.string()) for key in keys]))

    @property
    def fields(self) -> list[tuple[str, pa.DataType]]:
        """The name and Arrow type of each column of an exported exchange."""
        names = ("messages",) if self.are_messages else ("prompt", "completion")
        return [(name, self.kind) for name in names]

    def _of_job(self, prompt: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the (role, template) pairs of the job's own prompt. Messages from a column are not
        among them: `_column` is set to the path of that column."""
        kind = prompt.get("kind")
        if kind == "text":
            return [("text", str(prompt["text"]))]
        if kind == "openai":
            prompt = {"kind": "chat", "messages_column": f"{prompt['body_column']}.messages"}
            kind = "chat"
        if kind != "chat":
            what = (
                "its prompts are token ids" if kind == "tokens" else "its rows are of several jobs"
            )
            raise ConfigError(
                f"the prompts of {self._rows.user_path} cannot be made again ({what}): "
                f"{_GIVE % self._text}"
            )
        turns = [("system", str(prompt["system"]))] if prompt.get("system") else []
        if prompt.get("messages_column"):
            self._column = str(prompt["messages_column"]).split(".")
            if self._column[0] not in self._columns.names:
                raise ConfigError(
                    f"the prompts of {self._rows.user_path} were in its column "
                    f"{self._column[0]!r}, which its rows do not have: {_GIVE % self._text}"
                )
        elif prompt.get("messages"):
            turns += [(role, str(text)) for m in prompt["messages"] for role, text in m.items()]
        else:
            turns.append(("user", str(prompt.get("user") or "{{ question }}")))
        self._continues = bool(prompt.get("continue"))
        return turns

    def _template(self, key: str, source: str) -> RowTemplate:
        try:
            return RowTemplate(key, source, self._columns.names)
        except ConfigError as error:
            if key.startswith("--"):
                raise
            raise ConfigError(
                f"the prompts of {self._rows.user_path} cannot be made again ({error}): "
                f"{_GIVE % self._text}"
            ) from None

    def _wanted(self, sources: Sequence[str]) -> Wanted:
        names = {name for source in sources for name in used_columns({"user": source})}
        if any("row" in _free_names(source) for source in sources):
            names |= set(self._columns.names)
        names |= {self._text, *self._column[:1], *filter(None, [self._reasoning])}
        return self._columns.named(names)

    def of(self, row: LocatedRow) -> Exchange:
        """Return the conversation of a row. Raises ConfigError, which names the row, if it cannot
        be made."""
        answer = self._answer(row)
        if not self.are_messages:
            return Exchange(self._rendered(self._turns[0][1], row), answer)
        prompt = [
            {"role": role, "content": self._rendered(template, row)}
            for role, template in self._turns
        ]
        if self._column:
            prompt += self._stored(row)
        if self._continues and prompt and prompt[-1]["role"] == _ASSISTANT:
            answer = f"{prompt.pop()['content']}{answer}"
        last: Message = {"role": _ASSISTANT, "content": answer}
        if self._reasoning is not None:
            last["reasoning_content"] = row.variables[self._reasoning]
        return Exchange(prompt, [last])

    def has_answer(self, row: LocatedRow) -> bool:
        """Whether a row has an answer. Its text is null if the model ended or was cut off before
        the answer."""
        return self._given_answer is not None or row.variables[self._text] is not None

    def _answer(self, row: LocatedRow) -> str:
        if self._given_answer is not None:
            return self._rendered(self._given_answer, row)
        return str(row.variables[self._text])

    def _rendered(self, template: RowTemplate, row: LocatedRow) -> str:
        index = row.variables.get("row_index", row.position)
        try:
            return template.render(row.variables, index)
        except ValueError as error:  # a RequestError
            raise ConfigError(f"{set_row_name(row)}: {error}") from None

    def _stored(self, row: LocatedRow) -> list[Message]:
        """Return the messages in a row's column, with standard keys and roles."""
        value = field_value(row.variables, self._column)
        messages = []
        for item in value if isinstance(value, list) else [None]:
            message = {k: v for k, v in item.items() if v is not None} if item else {}
            role = message.pop("role", None) or message.pop("from", None)
            content = message.pop("content", None)
            content = message.pop("value", "") if content is None else content
            if not isinstance(role, str) or not isinstance(content, str):
                raise ConfigError(
                    f"{set_row_name(row)}: column {'.'.join(self._column)!r} has no list of "
                    "messages"
                )
            messages.append(
                {"role": _SHAREGPT_ROLES.get(role, role), "content": content, **message}
            )
        return messages


def field_value(fields: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return the value at a path: a column, then keys in it. A column may hold JSON text. None if
    the path does not exist."""
    value: Any = fields
    for name in path:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                return None
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _parsed(messages: str) -> list[tuple[str, str]]:
    """Return the (role, template) pairs of `--messages`."""
    values = load_yaml(messages, "--messages")
    is_list = isinstance(values, list) and all(isinstance(m, dict) and len(m) == 1 for m in values)
    turns = [turn for message in values for turn in message.items()] if is_list else []
    if not turns or not all(isinstance(r, str) and isinstance(t, str) for r, t in turns):
        raise ConfigError(
            "--messages must be a list of one role with its template each, such as "
            """[{user: "{{ question }}"}, {assistant: "{{ text }}"}]"""
        )
    return turns


def _free_names(source: str) -> set[str]:
    """Return the names that a template takes from its row."""
    from batchgen.util.templates.template_sandbox import BoundedEnvironment

    env = BoundedEnvironment()
    return set(env.undeclared(env.parse(source)))
