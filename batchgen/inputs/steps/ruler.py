"""The step that makes texts of a chosen length with facts to be found in them."""

from __future__ import annotations

import itertools
import random
import string
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchgen.inputs.steps.table_step import BadRow, StepRow, TableStep, Taken, Tools
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Features
    from transformers import PreTrainedTokenizerBase

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
_NIAH = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will "
    "quiz you about the {kind} afterwards.\n{context}\nWhat is the special magic {kind} for {key} "
    "mentioned in the provided text?"
)
_NIAH_PREFIX = "The special magic {kind} for {key} mentioned in the provided text is"
_CHAIN = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {value} in the text above."
)
_CHAIN_PREFIX = (
    "Answer: According to the chain(s) of variable assignment in the text above, 5 variables are "
    "assgined the value {value}, they are:"
)
_CODED = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
    "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
    "text?"
)
_CODED_PREFIX = (
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)
_TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "fwe")
_ADJECTIVES = (
    "able bitter calm dusty eager faint gentle hollow icy jolly keen lively muddy narrow odd plain "
    "quiet rough shiny tender useful vivid warm young"
).split()
_NOUNS = (
    "anchor basket candle dragon engine forest garden hammer island jacket kettle ladder meadow "
    "needle orchard pepper quarry ribbon shelter temple umbrella valley window yard"
).split()
_HOPS = 4
_ZETA_OF_2 = 1.6449340668482264
_LEAST = 512
_ROUNDS = 12
_FIRST = 8
"""Units that fit into the shortest length in any case."""


@dataclass(frozen=True)
class _Text:
    """A text with its question, the beginning of the answer, and what this must hold."""

    input: str
    answer_prefix: str
    outputs: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Ruler(TableStep):
    """Makes a row of RULER (Hsieh et al. 2024, arXiv 2404.06654): a text of a chosen length, and a
    question about what is hidden in it. Rows go through the tasks and then through the lengths, and
    what a row holds follows from its number and the seed.

    Its columns are `task`, `length`, `input`, `answer_prefix`, with which the answer begins, and
    `outputs`, the texts that it must hold. The text is as long as fits into `length` with `reserve`
    left, in tokens of the job's model. Tasks:

    - `niah_single_1`: a number among repeated sentences.
    - `niah_multikey_2`: a number among others, each with its key of two words.
    - `niah_multikey_3`: the same with keys and values that are UUIDs.
    - `vt`: five variables that hold one value, in a chain of assignments.
    - `fwe`: the three most frequent of coded words.

    Attributes:
        tasks: some of these.
        lengths: in tokens, for text, chat format and answer.
        reserve: tokens of `length` for the answer and the chat format.
        seed: another number gives other texts.
    """

    stable = True

    tasks: Sequence[str] = _TASKS
    lengths: Sequence[int] = (4096,)
    reserve: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("tasks", "lengths"):
            object.__setattr__(self, key, tuple(getattr(self, key)))
        if unknown := [name for name in self.tasks if name not in _TASKS]:
            raise ConfigError(f"tasks must be among {', '.join(_TASKS)}: {unknown[0]!r}")
        if not self.tasks or not self.lengths:
            raise ConfigError("give at least one of tasks and one of lengths")
        if self.reserve < 0:
            raise ConfigError(f"reserve must not be below 0: {self.reserve}")
        least = _LEAST + self.reserve
        if short := [one for one in self.lengths if type(one) is not int or one < least]:
            raise ConfigError(f"lengths must be whole numbers from {least} on: {short[0]!r}")

    def made(self, features: Features) -> Features:
        """What a row holds."""
        from datasets import Features, Value
        from datasets import List as ListOf

        text = Value("string")
        return Features(
            {
                "task": text,
                "length": Value("int64"),
                "input": text,
                "answer_prefix": text,
                "outputs": ListOf(text),
            }
        )

    def stored(self, features: Features) -> Features:
        """How long the text is, in units of its task."""
        from datasets import Features, Value

        return Features({"ruler_index": Value("int64"), "ruler_units": Value("int64")})

    def start(self, tools: Tools) -> _Texts:
        """The step at the first row."""
        if tools.tokenizer is None:
            raise ConfigError("Ruler needs a model with a tokenizer, which says how long texts are")
        return _Texts(self, tools.tokenizer)

    def restored(self, fields: Mapping[str, Any], k: int, stored: Mapping[str, Any]) -> Any:
        """The text, which is made again."""
        return self.row(stored["ruler_index"], stored["ruler_units"])

    def kind(self, index: int) -> tuple[str, int]:
        """The task and the length of a row."""
        task = self.tasks[index % len(self.tasks)]
        return task, self.lengths[index // len(self.tasks) % len(self.lengths)]

    def row(self, index: int, units: int) -> dict[str, Any]:
        """The columns of row `index` with a number of units of text."""
        task, length = self.kind(index)
        found = self.text(index, units)
        return {
            "task": task,
            "length": length,
            "input": found.input,
            "answer_prefix": found.answer_prefix,
            "outputs": list(found.outputs),
        }

    def text(self, index: int, units: int) -> _Text:
        """The text of row `index` with a number of units: sentences, needles or words."""
        task, length = self.kind(index)
        chance = random.Random(f"ruler {self.seed} {index} {task} {length}")
        if task == "vt":
            return _chain(chance, units)
        if task == "fwe":
            return _coded(chance, units, length // 50)
        return _needle(chance, units, task)


def _needle(chance: random.Random, units: int, task: str) -> _Text:
    """A needle in a haystack of `units` sentences."""
    is_uuid = task == "niah_multikey_3"
    kind = "uuid" if is_uuid else "number"

    def key() -> str:
        if is_uuid:
            return str(uuid.UUID(int=chance.getrandbits(128), version=4))
        return f"{chance.choice(_ADJECTIVES)}-{chance.choice(_NOUNS)}"

    def value() -> str:
        return key() if is_uuid else str(chance.randrange(10**6, 10**7))

    own, right = key(), value()
    at = chance.random()
    sentences = [_NOISE] * units
    if task != "niah_single_1":
        sentences = []
        while len(sentences) < units:
            if (other := key()) != own:
                sentences.append(_NEEDLE.format(kind=kind, key=other, value=value()))
    sentences.insert(
        int(at * (len(sentences) + 1)), _NEEDLE.format(kind=kind, key=own, value=right)
    )
    context = "\n".join(sentences)
    prefix = _NIAH_PREFIX.format(kind=kind, key=own)
    return _Text(_NIAH.format(kind=kind, context=context, key=own), prefix, [right])


def _chain(chance: random.Random, units: int) -> _Text:
    """A chain of assignments among `units` lines of noise."""
    names: dict[str, None] = {}
    while len(names) < _HOPS + 1:
        names["".join(chance.choices(string.ascii_uppercase, k=5))] = None
    found, value = list(names), str(chance.randrange(10000, 99999))
    lines = [f"VAR {found[0]} = {value}"]
    lines += [f"VAR {after} = VAR {before} " for before, after in itertools.pairwise(found)]
    places = sorted(chance.random() for _ in lines)
    sentences = [_NOISE + "\n"] * units
    for number, (place, line) in enumerate(zip(places, lines, strict=True)):
        sentences.insert(int(place * (units + 1)) + number, line)
    context = " ".join(sentences).replace(". \n", ".\n")
    return _Text(
        _CHAIN.format(context=context, value=value), _CHAIN_PREFIX.format(value=value), found
    )


def _coded(chance: random.Random, units: int, vocabulary: int) -> _Text:
    """About `units` coded words, the k-th of which stands there 1 / (zeta(2) k^2) of the times."""
    words: dict[str, None] = {}
    while len(words) < max(vocabulary, 4):
        words["".join(chance.choices(string.ascii_lowercase, k=6))] = None
    found = ["...", *list(words)[1:]]
    text: list[str] = []
    for rank, word in enumerate(found, start=1):
        text += [word] * int(units / (_ZETA_OF_2 * rank * rank))
    chance.shuffle(text)
    return _Text(_CODED.format(context=" ".join(text)), _CODED_PREFIX, found[1:4])


class _Texts:
    full = False

    def __init__(self, step: Ruler, tokenizer: PreTrainedTokenizerBase) -> None:
        self._step, self._tokenizer = step, tokenizer

    def take(self, row: StepRow) -> Taken:
        units = self._units(row.index)
        made = self._step.row(row.index, units)
        return [{**made, "ruler_index": row.index, "ruler_units": units}]

    def close(self) -> None:
        pass

    def _units(self, index: int) -> int:
        """The most units whose text fits, by how long texts of other sizes are."""
        task, length = self._step.kind(index)
        most = length - self._step.reserve
        fits, units, last = 0, _FIRST, (0, 0)
        too_many: int | None = None
        for _ in range(_ROUNDS):
            tokens = self._tokens(index, units)
            if tokens <= most:
                fits = max(fits, units)
            else:
                too_many = units if too_many is None else min(too_many, units)
            each = max((tokens - last[1]) / (units - last[0]), 0.1)
            last = units, tokens
            guess = units + int((most - tokens) / each)
            low, high = fits + 1, (too_many or guess + 2) - 1
            if low > high:
                break
            guess = min(max(guess, low), high)
            if guess == last[0]:
                break
            units = guess
        if fits == 0:
            raise BadRow(f"{task}: no text fits into {most} tokens: raise Ruler's lengths")
        return fits

    def _tokens(self, index: int, units: int) -> int:
        found = self._step.text(index, units)
        return len(self._tokenizer(found.input, add_special_tokens=False, verbose=False).input_ids)
