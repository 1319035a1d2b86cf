"""The 25 checks of IFEval (Zhou et al. 2023, arXiv 2311.07911).

Each check takes a response and the arguments of its instruction, and returns whether the response
follows the instruction, as the published checks do (google-research, instruction_following_eval).
Keywords are plain texts here, never regular expressions, and every check takes time in proportion
to the text. `IFEVAL` lists them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from batchgen.evals.instructions.arguments import InstructionArguments
from batchgen.evals.instructions.language import language_of
from batchgen.evals.instructions.sentences import count_sentences, count_words

Check = Callable[[str, InstructionArguments], bool]
_YES_OR_NO = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
# A word, with hyphens and apostrophes in it.
_TOKEN = re.compile(r"[^\W_](?:[^\s\"(),:;!?\[\]{}<>]*[^\W_])?")
_FENCES = ("```json", "```Json", "```JSON", "```")


def _keywords(text: str, args: InstructionArguments) -> bool:
    """All keywords occur, in any case."""
    return all(_occurrences(text, keyword) for keyword in args.texts("keywords"))


def _keyword_frequency(text: str, args: InstructionArguments) -> bool:
    """The keyword occurs as often as the relation and the number say."""
    return args.compares(_occurrences(text, args.text("keyword")), "frequency")


def _occurrences(text: str, keyword: str) -> int:
    return len(re.findall(re.escape(keyword.strip()), text, re.IGNORECASE))


def _forbidden_words(text: str, args: InstructionArguments) -> bool:
    """None of the words occurs as a whole word."""
    words = map(re.escape, args.texts("forbidden_words"))
    return not any(re.search(rf"(?<!\w){word}(?!\w)", text, re.IGNORECASE) for word in words)


def _letter_frequency(text: str, args: InstructionArguments) -> bool:
    """The letter occurs as often as the relation and the number say."""
    count = text.lower().count(args.text("letter").strip().lower())
    return args.compares(count, "let_frequency", "let_relation")


def _response_language(text: str, args: InstructionArguments) -> bool:
    """The text is in the language, or in none that can be recognised."""
    return language_of(text) in (args.text("language"), None)


def _number_sentences(text: str, args: InstructionArguments) -> bool:
    return args.compares(count_sentences(text), "num_sentences")


def _number_words(text: str, args: InstructionArguments) -> bool:
    return args.compares(count_words(text), "num_words")


def _number_paragraphs(text: str, args: InstructionArguments) -> bool:
    """Paragraphs are divided by ***, and only the first and the last may be empty."""
    parts = [part.strip() for part in text.split("***")]
    inner = parts[bool(not parts[0]) : len(parts) - (len(parts) > 1 and not parts[-1])]
    return all(inner) and len(inner) == args.number("num_paragraphs")


def _nth_paragraph_first_word(text: str, args: InstructionArguments) -> bool:
    """Paragraphs are divided by empty lines; blank ones count when the nth is looked up."""
    parts, nth = text.split("\n\n"), args.number("nth_paragraph")
    count = sum(bool(part.strip()) for part in parts)
    if not 1 <= nth <= count or not (words := parts[nth - 1].split()):
        return False
    first = re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'), maxsplit=1)[0].lower()
    return count == args.number("num_paragraphs") and first == args.text("first_word").lower()


def _number_placeholders(text: str, args: InstructionArguments) -> bool:
    """Placeholders are in square brackets, within a line."""
    return sum(map(_placeholders, text.split("\n"))) >= args.number("num_placeholders")


def _placeholders(line: str) -> int:
    count, at = 0, 0
    while (start := line.find("[", at)) >= 0 and (end := line.find("]", start)) >= 0:
        count, at = count + 1, end + 1
    return count


def _postscript(text: str, args: InstructionArguments) -> bool:
    """The marker of a postscript occurs, such as P.S. or P.P.S."""
    marker = args.text("postscript_marker").strip().lower()
    patterns = {"p.p.s": r"p\.\s?p\.\s?s", "p.s.": r"p\.\s?s\."}
    return re.search(patterns.get(marker, re.escape(marker)), text.lower()) is not None


def _number_bullet_lists(text: str, args: InstructionArguments) -> bool:
    """Bullets are lines that begin with - or with a single *."""
    lines = (line.lstrip() for line in text.split("\n"))
    bullets = [line for line in lines if line[:1] == "-" or re.match(r"\*[^*]", line)]
    return len(bullets) == args.number("num_bullets")


def _constrained_response(text: str, args: InstructionArguments) -> bool:
    """One of the three answers in _YES_OR_NO occurs."""
    return any(answer in text for answer in _YES_OR_NO)


def _number_highlighted_sections(text: str, args: InstructionArguments) -> bool:
    """Highlights are between two * or between two **, within a line."""
    single = (match.strip("*") for match in re.findall(r"\*[^\n*]*\*", text))
    double = (match[2:-2] for match in re.findall(r"\*\*[^\n*]*\*\*", text))
    count = sum(bool(match.strip()) for match in (*single, *double))
    return count >= args.number("num_highlights")


def _multiple_sections(text: str, args: InstructionArguments) -> bool:
    """Sections begin with a word and their number, such as SECTION 1."""
    splitter = re.escape(args.text("section_spliter").strip())  # the key is spelled so
    return len(re.findall(rf"{splitter}\s?\d+", text)) >= args.number("num_sections")


def _json_format(text: str, args: InstructionArguments) -> bool:
    """The whole text is JSON, which may be in a fenced block."""
    text = text.strip()
    for fence in _FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str, args: InstructionArguments) -> bool:
    """A title is between << and >>, within a line."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and line[start:end].strip("< >"):
            return True
    return False


def _two_responses(text: str, args: InstructionArguments) -> bool:
    """Two different responses, with six * between them and possibly around them."""
    parts = [part.strip() for part in text.split("******")]
    responses = [part for part in parts if part]
    if not all(parts[1:-1]):
        return False
    return len(responses) == 2 and responses[0] != responses[1]


def _repeat_prompt(text: str, args: InstructionArguments) -> bool:
    """The text begins with the prompt."""
    prompt = args.text("prompt_to_repeat")
    return text.strip().lower().startswith(prompt.strip().lower())


def _end_checker(text: str, args: InstructionArguments) -> bool:
    """The text ends with the phrase."""
    return text.strip().strip('"').lower().endswith(args.text("end_phrase").strip().lower())


def _capital_word_frequency(text: str, args: InstructionArguments) -> bool:
    """Words in capital letters; a word with hyphens is one."""
    count = sum(word.isupper() for word in _TOKEN.findall(text))
    return args.compares(count, "capital_frequency", "capital_relation")


def _english_capital(text: str, args: InstructionArguments) -> bool:
    """All letters are capitals, and the language is English or not recognised."""
    return text.isupper() and language_of(text) in ("en", None)


def _english_lowercase(text: str, args: InstructionArguments) -> bool:
    """All letters are small, and the language is English or not recognised."""
    return text.islower() and language_of(text) in ("en", None)


def _no_comma(text: str, args: InstructionArguments) -> bool:
    return "," not in text


def _quotation(text: str, args: InstructionArguments) -> bool:
    """The whole text is in double quotes."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


IFEVAL: Mapping[str, Check] = {
    "keywords:existence": _keywords,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _response_language,
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:number_words": _number_words,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "detectable_content:number_placeholders": _number_placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _number_bullet_lists,
    "detectable_format:constrained_response": _constrained_response,
    "detectable_format:number_highlighted_sections": _number_highlighted_sections,
    "detectable_format:multiple_sections": _multiple_sections,
    "detectable_format:json_format": _json_format,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _end_checker,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_word_frequency,
    "change_case:english_capital": _english_capital,
    "change_case:english_lowercase": _english_lowercase,
    "punctuation:no_comma": _no_comma,
}
"""The checks by the ids of their instructions."""
