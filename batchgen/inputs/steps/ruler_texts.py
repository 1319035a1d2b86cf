"""Generates the texts of RULER's tasks with a random generator, for the row step `Ruler`.

The tasks are those of Hsieh et al. 2024, arXiv 2404.06654, as in lm-eval 0.4.13
(lm_eval/tasks/ruler: niah_utils.py, prepare_niah.py, cwe_utils.py, fwe_utils.py, vt_utils.py). Only
the words and the prose are our own. The tasks are `niah_…` (needles in a haystack), `vt` (variable
tracking), `cwe` (common words extraction) and `fwe` (frequent words extraction). *Needles* are the
facts that are hidden in a text. The entry point is `ruler_text`.
"""

from __future__ import annotations

import itertools
import random
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

# The texts of the original tasks: for each task a template of the input, named after the task, and
# one of the beginning of the answer (_PREFIX). _NIAH_MANY is for several answers.
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
_NIAH = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will "
    "quiz you about the {kind} afterwards.\n{context}\nWhat is the special magic {kind} for {key} "
    "mentioned in the provided text?"
)
_NIAH_PREFIX = "The special magic {kind} for {key} mentioned in the provided text is"
_VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {value} in the text above."
)
_VT_PREFIX = (  # "assgined" is in the original, too
    "Answer: According to the chain(s) of variable assignment in the text above, 5 variables are "
    "assgined the value {value}, they are:"
)
_FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
    "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
    "text?"
)
_FWE_PREFIX = (
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)
_ADJECTIVES = (
    "able bitter calm dusty eager faint gentle hollow icy jolly keen lively muddy narrow odd plain "
    "quiet rough shiny tender useful vivid warm young"
).split()
_NOUNS = (
    "anchor basket candle dragon engine forest garden hammer island jacket kettle ladder meadow "
    "needle orchard pepper quarry ribbon shelter temple umbrella valley window yard"
).split()
_HOPS = 4
"""The assignments of a variable to another in a chain of `vt`."""
_ZETA_OF_2 = 1.6449340668482264
"""The sum of 1 / k^2 over all k, which normalises the frequencies of coded words in `fwe`."""
_NIAH_MANY = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the {kind}s afterwards.\n{context}\nWhat are all the special magic "
    "{kind}s for {key} mentioned in the provided text?"
)
_NIAH_MANY_PREFIX = "The special magic {kind}s for {key} mentioned in the provided text are"
_CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most common "
    "words in the above list?"
)
_CWE_PREFIX = "Answer: The top 10 words that appear most often in the list are:"
_COMMON = 10
"""The number of common words of `cwe`."""
_SHORT = 4096
"""From this length on, `cwe` repeats common words 30 times and others 3 times; below, 6 times and
once."""
_DEPTHS = 40
"""The number of depths at which a needle can be in prose."""
_PROSE = (
    "Nobody in the {noun} had expected such a {adjective} {other}.",
    "When the {noun} came into view, the {other} looked more {adjective} than before.",
    "It takes a {adjective} mind to tell one {noun} from the next {other}.",
    "She wrote about the {noun} for years, and only later about the {adjective} {other}.",
    "What the {other} needs is not a {noun} but a {adjective} reason to wait.",
    "Most people walk past a {adjective} {noun} and remember the {other} instead.",
    "There was a {noun} on the table, which made the {other} seem {adjective}.",
    "He sold the {adjective} {noun} in spring and never asked about the {other} again.",
)
"""Templates of sentences, which replace the essays of the original tasks."""


@dataclass(frozen=True)
class RulerText:
    """A text with its question.

    Attributes:
        input: the text and the question.
        answer_prefix: the beginning of the answer.
        outputs: the texts that the answer must contain.
    """

    input: str
    answer_prefix: str
    outputs: Sequence[str]


@dataclass(frozen=True)
class _Needles:
    """What a task hides in a text.

    Attributes:
        among: the haystack: repeated sentences, prose, or other needles.
        keys: the number of keys, each with `values` values.
        queries: the number of keys that are asked for.
        uuid_keys, uuid_values: whether these are UUIDs instead of words and numbers.
    """

    among: Literal["repeat", "prose", "needles"]
    keys: int = 1
    values: int = 1
    queries: int = 1
    uuid_keys: bool = False
    uuid_values: bool = False


_NEEDLES = {
    "niah_single_1": _Needles("repeat"),
    "niah_single_2": _Needles("prose"),
    "niah_single_3": _Needles("prose", uuid_values=True),
    "niah_multikey_1": _Needles("prose", keys=4),
    "niah_multikey_2": _Needles("needles"),
    "niah_multikey_3": _Needles("needles", uuid_keys=True, uuid_values=True),
    "niah_multivalue": _Needles("prose", values=4),
    "niah_multiquery": _Needles("prose", keys=4, queries=4),
}
TASKS = (*_NEEDLES, "vt", "cwe", "fwe")
"""The names of the tasks."""


def ruler_text(task: str, length: int, units: int, chance: random.Random) -> RulerText:
    """Return a text of a task.

    Args:
        length: the row's length in tokens. It decides the repetitions in `cwe` and the vocabulary
            of `fwe`.
        units: the size of the text: sentences, needles or words, by the task.
        chance: the generator that decides what the text says.
    """
    if task == "vt":
        return _variable_tracking(chance, units)
    if task == "cwe":
        return _common_words(chance, units, is_short=length < _SHORT)
    if task == "fwe":
        return _frequent_words(chance, units, length // 50)
    return _in_haystack(chance, units, _NEEDLES[task])


def _uuid(chance: random.Random) -> str:
    return str(uuid.UUID(int=chance.getrandbits(128), version=4))


def _in_haystack(chance: random.Random, units: int, hidden: _Needles) -> RulerText:
    """Return needles in a haystack of `units` sentences."""
    kind = "uuid" if hidden.uuid_values else "number"

    def key() -> str:
        if hidden.uuid_keys:
            return _uuid(chance)
        return f"{chance.choice(_ADJECTIVES)}-{chance.choice(_NOUNS)}"

    def value() -> str:
        return _uuid(chance) if hidden.uuid_values else str(chance.randrange(10**6, 10**7))

    facts: dict[str, dict[str, None]] = {}  # the values of each key, in order, each once
    while len(facts) < hidden.keys:
        values = facts.setdefault(key(), {})
        while len(values) < hidden.values:
            values[value()] = None
    needles = [
        _NEEDLE.format(kind=kind, key=hidden_key, value=hidden_value)
        for hidden_key, values in facts.items()
        for hidden_value in values
    ]
    queries = chance.sample(list(facts), hidden.queries) if hidden.queries > 1 else [*facts][:1]
    if hidden.among == "prose":
        context = _in_prose(chance, units, needles)
    else:
        depth = chance.random()  # from 0, the start of the text, to 1
        sentences = [_NOISE] * units
        if hidden.among == "needles":
            sentences = []
            while len(sentences) < units:
                if (other := key()) not in facts:
                    sentences.append(_NEEDLE.format(kind=kind, key=other, value=value()))
        (needle,) = needles  # these tasks have one
        sentences.insert(int(depth * (len(sentences) + 1)), needle)
        context = "\n".join(sentences)
    query_text = (
        queries[0] if len(queries) == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
    )
    outputs = [value for hidden_key in queries for value in facts[hidden_key]]
    template, prefix = (
        (_NIAH, _NIAH_PREFIX) if len(outputs) == 1 else (_NIAH_MANY, _NIAH_MANY_PREFIX)
    )
    return RulerText(
        template.format(kind=kind, context=context, key=query_text),
        prefix.format(kind=kind, key=query_text),
        outputs,
    )


def _in_prose(chance: random.Random, units: int, needles: Sequence[str]) -> str:
    """Return `units` sentences of prose, with the needles in random order at random depths out of
    _DEPTHS."""
    order = chance.sample(list(needles), len(needles))
    depths = sorted(chance.sample(range(_DEPTHS), len(needles)))
    sentences = [_sentence(chance) for _ in range(units)]
    for number, (depth, needle) in enumerate(zip(depths, order, strict=True)):
        sentences.insert(round(depth / (_DEPTHS - 1) * units) + number, needle)
    return " ".join(sentences)


def _sentence(chance: random.Random) -> str:
    """Return a random sentence of prose."""
    noun, other = chance.sample(_NOUNS, 2)
    sentence = chance.choice(_PROSE)
    return sentence.format(noun=noun, other=other, adjective=chance.choice(_ADJECTIVES))


def _common_words(chance: random.Random, units: int, *, is_short: bool) -> RulerText:
    """Return a numbered list of ten common words, each repeated often, and `units` rarer words."""
    words = _different(_COMMON + units, lambda: _syllables(chance))
    common, rare = words[:_COMMON], words[_COMMON:]
    often, seldom = (6, 1) if is_short else (30, 3)
    repeated = common * often + rare * seldom
    chance.shuffle(repeated)
    context = " ".join(f"{number}. {word}" for number, word in enumerate(repeated, start=1))
    return RulerText(_CWE.format(context=context), _CWE_PREFIX, common)


def _syllables(chance: random.Random) -> str:
    """Return a word of three syllables. All such words have the same length, so none is a part of
    another."""
    return "".join(chance.choice("bdgkmnrstv") + chance.choice("aeiou") for _ in range(3))


def _different(count: int, make: Callable[[], str]) -> list[str]:
    """Call `make` until it has returned `count` different texts, and return these."""
    texts: dict[str, None] = {}
    while len(texts) < count:
        texts[make()] = None
    return list(texts)


def _variable_tracking(chance: random.Random, units: int) -> RulerText:
    """Return a chain of assignments among `units` lines of noise."""
    names = _different(_HOPS + 1, lambda: "".join(chance.choices(string.ascii_uppercase, k=5)))
    value = str(chance.randrange(10000, 99999))
    lines = [f"VAR {names[0]} = {value}"]
    lines += [f"VAR {after} = VAR {before} " for before, after in itertools.pairwise(names)]
    positions = sorted(chance.random() for _ in lines)
    sentences = [_NOISE + "\n"] * units
    for number, (position, line) in enumerate(zip(positions, lines, strict=True)):
        sentences.insert(int(position * (units + 1)) + number, line)
    context = " ".join(sentences).replace(". \n", ".\n")
    return RulerText(
        _VT.format(context=context, value=value), _VT_PREFIX.format(value=value), names
    )


def _frequent_words(chance: random.Random, units: int, vocabulary: int) -> RulerText:
    """Return about `units` words of text, in which the k-th coded word has a share of
    1 / (zeta(2) k^2). `vocabulary` is the number of different coded words."""
    words = _different(
        max(vocabulary, 4), lambda: "".join(chance.choices(string.ascii_lowercase, k=6))
    )
    # The most frequent word is dots, which the question says to ignore; the next three count.
    coded = ["...", *words[1:]]
    text: list[str] = []
    for rank, word in enumerate(coded, start=1):
        text += [word] * int(units / (_ZETA_OF_2 * rank * rank))
    chance.shuffle(text)
    return RulerText(_FWE.format(context=" ".join(text)), _FWE_PREFIX, coded[1:4])
