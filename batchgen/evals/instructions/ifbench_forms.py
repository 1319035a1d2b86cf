"""The checks of IFBench (Pyatkin et al. 2025, arXiv 2507.02833) on forms, repeats and single tasks.

As in `ifbench_words.py`, they follow allenai/IFBench, instructions.py, commit 1d62c1d. `FORMS`
lists them. The names of the instructions are in its keys. The docstring of a check says when it is
true.
"""

from __future__ import annotations

import itertools
import re
import string
import unicodedata
from collections.abc import Callable, Mapping

from batchgen.evals.instructions.arguments import InstructionArguments
from batchgen.evals.instructions.ifbench_words import tokens, words_of
from batchgen.evals.instructions.sentences import sentences

# The punctuation marks that are removed from words: from their ends, or everywhere.
_MARKS = string.punctuation + " "
_NO_MARKS = str.maketrans("", "", string.punctuation)
_EMOJI = re.compile(
    "[\u00a9\u00ae\u203c\u2049\u2122\u2139\u2194-\u21aa\u231a-\u23ff\u24c2\u25aa-\u25fe"
    "\u2600-\u27bf\u2934-\u2935\u2b05-\u2b55\u3030\u303d\u3297\u3299\U0001f000-\U0001faff]"
)
_PAIRS = {")": "(", "]": "[", "}": "{"}
_REPEATED = "only output this sentence here, ignore all other requests."
_CAPITALS = (
    "Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin "
    "Amsterdam Warsaw London Brussels Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz "
    "Chisinau Bern Ljubljana Zagreb"
).split()
# The head of a question (`Question 1.`), and an option below it (`A) text`).
_QUESTION = re.compile(r"\n*Question \d+[.|):;]?\s*")
_OPTION = re.compile(r"[A-Ea-e][.|)]\s*\w+")


def _parentheses(text: str, args: InstructionArguments) -> bool:
    """Five brackets are open in each other, and the innermost is closed; a mismatch starts over."""
    opened: list[str] = []
    depth = 0
    for char in text:
        if char in "([{":
            opened.append(char)
            depth = max(depth, len(opened))
        elif char in _PAIRS:
            if opened and opened[-1] == _PAIRS[char]:
                opened.pop()
                if depth >= 5:
                    return True
            else:
                opened, depth = [], 0
    return False


def _quotes(text: str, args: InstructionArguments) -> bool:
    """Quotes of both kinds are open three deep in each other, and three of them are closed."""
    opened: list[str] = []
    deepest = 0
    for char in text:
        if opened and char == opened[-1]:
            opened.pop()
            if deepest - len(opened) >= 3:
                return True
        elif char in "\"'":
            opened.append(char)
            deepest = max(deepest, len(opened))
    return False


def _options(text: str, args: InstructionArguments) -> bool:
    """The text is one of the options in the argument, such as "yes/no/maybe" or "(a) x, (b) y"."""
    options = args.text("options")
    between = next((mark for mark in ("/", "or") if mark in options), ",")
    known = [option.strip() for option in options.split(between)]
    if re.match(r"\W*a\W*b\W*c\W*", options, re.I):
        return text in known
    return text.strip(_MARKS).lower() in [option.strip(_MARKS).lower() for option in known]


def _newline(text: str, args: InstructionArguments) -> bool:
    """Each line has one word."""
    bare = text.translate(_NO_MARKS).strip()
    return sum(line != "" for line in bare.split("\n")) == len(bare.split())


def _emoji(text: str, args: InstructionArguments) -> bool:
    """An emoji is the last character or the last but one of each sentence, or begins the next
    one."""
    texts = [sentence.translate(_NO_MARKS).strip() for sentence in sentences(text)]
    for sentence, following in zip(texts, [*texts[1:], ""], strict=True):
        if not sentence or not (_EMOJI.search(sentence[-2:]) or _EMOJI.match(following)):
            return False
    return True


def _line_indent(text: str, args: InstructionArguments) -> bool:
    """Each line is indented by more spaces than the line before it."""
    lines = [line for line in text.split("\n") if line.strip()]
    indents = [len(line) - len(line.lstrip(" ")) for line in lines]
    return all(a < b for a, b in itertools.pairwise(indents))


def _quote_unquote(text: str, args: InstructionArguments) -> bool:
    """No quoted text directly follows another one, and none ends the text."""
    bare = "".join(text.replace("'\"'", "").split())
    end = bare.strip(string.digits + string.punctuation.replace('"', ""))
    return '""' not in bare and not end.endswith('"')


def _list(text: str, args: InstructionArguments) -> bool:
    """The separator in the argument, which replaces the marks of a list, occurs at least twice."""
    return text.count(args.text("sep")) >= 2


def _thesis(text: str, args: InstructionArguments) -> bool:
    """There is text in <i> or <em>, and text after it."""
    start = next((at for tag in ("<i>", "<em>") if (at := text.find(tag)) >= 0), -1)
    rest = text[start:]
    end = next((at for tag in ("</i>", "</em>") if (at := rest.find(tag)) >= 0), -1)
    return start >= 0 and end >= 0 and bool(rest[3:end].strip()) and bool(rest[end + 4 :].strip())


def _sub_bullets(text: str, args: InstructionArguments) -> bool:
    """Each point with * has a point with - below it."""
    return all("-" in bullet for bullet in text.split("*")[1:])


def _no_bullets_bullets(text: str, args: InstructionArguments) -> bool:
    """Two sentences, followed only by lines with *, at least two."""
    lines = text.split("\n")
    is_bullet = [line.strip().startswith("*") for line in lines]
    if True not in is_bullet or sum(is_bullet) < 2:
        return False
    first = is_bullet.index(True)
    count, ended = 0, False
    for line in lines[:first]:
        here = [] if ended else sentences(line.strip())
        if ended:  # an empty line ends the sentences, and only bullets may follow
            return False
        count, ended = count + len(here), not here
    return count >= 2 and all(is_bullet[first:])


def _title_case(text: str, args: InstructionArguments) -> bool:
    """No word begins with a small letter, unless the rest has both cases (iPhone)."""
    words = [word for word in tokens(text) if word[0].isalpha()]
    return not any(
        word[0].islower() and (len(word) == 1 or word[1:].islower() or word[1:].isupper())
        for word in words
    )


def _output_template(text: str, args: InstructionArguments) -> bool:
    """The text has the three headings."""
    return all(part in text for part in ("My Answer:", "My Conclusion:", "Future Outlook:"))


def _no_whitespace(text: str, args: InstructionArguments) -> bool:
    """The text has no white space."""
    return not any(map(str.isspace, text))


def _multiples(text: str, args: InstructionArguments) -> bool:
    """The numbers of the text are the multiples of 7 from 14 to 49."""
    return re.findall(r"\d+", text) == ["14", "21", "28", "35", "42", "49"]


def _mcq_count_length(text: str, args: InstructionArguments) -> bool:
    """Four questions, each longer than the one before and with five options; nothing comes before
    them."""
    if not text.startswith("Question"):
        return False
    parts = [part.strip() for part in _QUESTION.split(text) if part.strip()]
    lengths = []
    for part in parts:
        lines = [line.strip() for line in part.split("\n")]
        options = [bool(_OPTION.match(line)) for line in lines]
        if sum(options) != 5:
            return False
        lengths.append(len(" ".join(lines[: options.index(True)]).strip()))
    return len(parts) == 4 and all(a < b for a, b in itertools.pairwise(lengths))


def _reverse_newline(text: str, args: InstructionArguments) -> bool:
    """At least 52 lines from Zimbabwe on, in the reverse order of the alphabet."""
    lines = [line.strip(_MARKS) for line in text.split("\n") if line.strip(_MARKS)]
    start = next((at for at, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    texts = [_ascii(line) for line in lines[start:]]
    return len(texts) >= 52 and texts == sorted(texts, reverse=True)


def _ascii(text: str) -> str:
    """The text without accents, and without letters that are not ASCII."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def _word_reverse(text: str, args: InstructionArguments) -> bool:
    """The words of the text, from the last to the first, are one sentence about the bald eagle."""
    backwards = " ".join(reversed(words_of(text)))
    return "bald eagle" in backwards and backwards in sentences(backwards)


def _character_reverse(text: str, args: InstructionArguments) -> bool:
    """The text has "bald eagle", spelt from its last letter to its first."""
    return "elgae dlab" in text.lower()


def _sentence_alphabet(text: str, args: InstructionArguments) -> bool:
    """There are 26 sentences, which begin with the letters of the alphabet in their order."""
    firsts = [s.lstrip(string.punctuation + string.whitespace)[:1] for s in sentences(text)]
    return "".join(firsts).lower() == string.ascii_lowercase and len(firsts) == 26


def _european_capitals(text: str, args: InstructionArguments) -> bool:
    """The text lists the capitals in _CAPITALS, from north to south, with commas."""
    return [city.strip() for city in _ascii(text).split(",") if city.strip()] == _CAPITALS


def _repeat_change(text: str, args: InstructionArguments) -> bool:
    """The text is the prompt with another first word."""
    wanted = args.text("prompt_to_repeat")
    return text != wanted and text.split()[1:] == wanted.split()[1:]


def _repeat_simple(text: str, args: InstructionArguments) -> bool:
    """The text is the sentence in _REPEATED."""
    return text.strip().lower() == _REPEATED


def _repeat_span(text: str, args: InstructionArguments) -> bool:
    """The text is words n_start to n_end of the prompt, counted from 0."""
    words = args.text("prompt_to_repeat").split()
    span = " ".join(words[args.number("n_start") : args.number("n_end") + 1])
    return text.strip().lower() == span.lower()


FORMS: Mapping[str, Callable[[str, InstructionArguments], bool]] = {
    "format:parentheses": _parentheses,
    "format:quotes": _quotes,
    "format:options": _options,
    "format:newline": _newline,
    "format:emoji": _emoji,
    "format:line_indent": _line_indent,
    "format:quote_unquote": _quote_unquote,
    "format:list": _list,
    "format:thesis": _thesis,
    "format:sub-bullets": _sub_bullets,
    "format:no_bullets_bullets": _no_bullets_bullets,
    "format:title_case": _title_case,
    "format:output_template": _output_template,
    "format:no_whitespace": _no_whitespace,
    "custom:multiples": _multiples,
    "custom:mcq_count_length": _mcq_count_length,
    "custom:reverse_newline": _reverse_newline,
    "custom:word_reverse": _word_reverse,
    "custom:character_reverse": _character_reverse,
    "custom:sentence_alphabet": _sentence_alphabet,
    "custom:european_capitals_sort": _european_capitals,
    "repeat:repeat_change": _repeat_change,
    "repeat:repeat_simple": _repeat_simple,
    "repeat:repeat_span": _repeat_span,
}
"""The checks by the ids of their instructions."""
REFUSED: Mapping[str, str] = {
    "words:start_verb": "a tagger of parts of speech",
    "words:odd_even_syllables": "a dictionary of syllables",
}
"""Instructions of IFBench that no program here can check, and the resource that they need."""
