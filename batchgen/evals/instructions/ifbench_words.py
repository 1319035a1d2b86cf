"""The checks of IFBench (Pyatkin et al. 2025, arXiv 2507.02833) on words and sentences.

Each check takes a response and the arguments of its instruction, and returns whether the response
follows the instruction, as the published checks do (allenai/IFBench, instructions.py, commit
1d62c1d). Its docstring says when it is true. `WORDS` lists the checks.
"""

from __future__ import annotations

import itertools
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping

from batchgen.evals.instructions.arguments import InstructionArguments
from batchgen.evals.instructions.sentences import count_words, sentences

# The punctuation marks that are removed from words: from their ends, or everywhere.
_MARKS = string.punctuation + " "
_NO_MARKS = str.maketrans("", "", string.punctuation)
_TOKEN = re.compile(
    r"[^\W_]+(?=n't\b)|n't\b|'(?:s|m|re|ve|ll|d)\b|"
    r"[^\W_]+(?:(?:[-._]|(?<=\d),(?=\d)|'(?!(?:s|m|re|ve|ll|d|t)\b))[^\W_]+)*|[^\w\s]",
    re.I,
)
"""A word up to "n't", a contraction ("n't", "'s"), a whole word or number with inner marks
("e-mail", "1,000"), or a single mark."""
_JAPANESE = re.compile("[\u3040-\u30ff\u4e00-\u9fff]")
# Two consonants in a row.
_CONSONANTS = re.compile("[b-df-hj-np-tv-z]{2}")
_CONJUNCTIONS = frozenset("and but for nor or so yet".split())
_NAMES = (
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander "
    "Amelia Benjamin Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel "
    "Ella Jacob Scarlett Nathan Victoria Elijah Layla Nicholas Audrey David Hannah Christopher "
    "Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella Jonathan"
).split()
_PRONOUNS = frozenset(
    "i me we us you he him she her it they them my mine our ours your yours his hers its their "
    "theirs myself ourselves yourself yourselves himself herself itself themselves this that these "
    "those who whom whose which what whoever whomever whatever whichever anybody anyone anything "
    "everybody everyone everything nobody nothing somebody someone something each either neither "
    "both all some any none".split()
)
_STOP_WORDS = frozenset(
    "i me my myself we our ours ourselves you your yours yourself yourselves he him his himself "
    "she her hers herself it its itself they them their theirs themselves what which who whom this "
    "that these those am is are was were be been being have has had having do does did doing a an "
    "the and but if or because as until while of at by for with about against between into through "
    "during before after above below to from up down in out on off over under again further then "
    "once here there when where why how all any both each few more most other some such no nor not "
    "only own same so than too very s t can will just don should now d ll m o re ve y ain aren "
    "couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn weren won "
    "wouldn".split()
)
_PRIMES = frozenset(n for n in range(2, 100) if all(n % d for d in range(2, n)))


def tokens(text: str) -> list[str]:
    """Return words, parts of contractions (do n't) and punctuation marks."""
    return _TOKEN.findall(text)


def words_of(text: str) -> list[str]:
    """Return the words in lower case, without any punctuation marks."""
    return text.lower().translate(_NO_MARKS).split()


def _word_tokens(text: str) -> list[str]:
    return [token for token in tokens(text) if any(map(str.isalnum, token))]


def _word_count_range(text: str, args: InstructionArguments) -> bool:
    """There are from `min_words` to `max_words` words."""
    return args.number("min_words") <= count_words(text) <= args.number("max_words")


def _unique_word_count(text: str, args: InstructionArguments) -> bool:
    """There are at least N different words."""
    return len({word.strip(_MARKS) for word in text.lower().split()}) >= args.number("N")


def _stop_words(text: str, args: InstructionArguments) -> bool:
    """At most `percentage` percent of the words are stop words."""
    words = re.findall(r"\w+", text.lower())
    share = sum(word in _STOP_WORDS for word in words) / max(1, len(words))
    return bool(words) and share * 100 <= args.number("percentage")


def _counts(text: str) -> tuple[int, int, int]:
    """Return the numbers of sentences that end with a full stop, a question mark and an exclamation
    mark."""
    ends = Counter(sentence[-1] for sentence in sentences(text))
    return ends["."], ends["?"], ends["!"]


def _sentence_type(text: str, args: InstructionArguments) -> bool:
    """There are twice as many statements as questions."""
    statements, questions, _ = _counts(text)
    return statements == 2 * questions


def _sentence_balance(text: str, args: InstructionArguments) -> bool:
    """There are equally many statements, questions and exclamations."""
    return len({*_counts(text)}) == 1


def _sentence_words(text: str, args: InstructionArguments) -> bool:
    """There are three sentences of equally many characters, and no word occurs twice."""
    texts = sentences(text)
    words = words_of(" ".join(texts))
    same_length = len({*map(len, texts)}) == 1
    return len(texts) == 3 and same_length and len(words) == len({*words})


def _conjunctions(text: str, args: InstructionArguments) -> bool:
    """Conjunctions count as different if they are written differently: `and` and `And,` are two."""
    words = {word for word in text.split() if word.strip(_MARKS).lower() in _CONJUNCTIONS}
    return len(words) >= args.number("small_n")


def _person_names(text: str, args: InstructionArguments) -> bool:
    """At least N of the names in _NAMES occur."""
    return sum(bool(re.search(rf"\b{name}\b", text)) for name in _NAMES) >= args.number("N")


def _overlap(text: str, args: InstructionArguments) -> bool:
    """The reference text contains `percentage` percent of the response's different runs of three
    tokens, up to 2 percent more or less."""
    in_text, reference = (
        {*zip(words, words[1:], words[2:], strict=False)}
        for words in (tokens(text), tokens(args.text("reference_text")))
    )
    share = 100 * len(in_text & reference) / max(1, len(in_text))
    return bool(in_text) and abs(share - args.number("percentage")) <= 2


def _numbers(text: str, args: InstructionArguments) -> bool:
    """There are exactly N numbers."""
    return len(re.findall(r"\d+", text.translate(_NO_MARKS))) == args.number("N")


def _punctuation(text: str, args: InstructionArguments) -> bool:
    """Every kind of punctuation mark occurs, and an interrobang (?!, !? or ‽). The marks of ?! and
    !? do not count as a question mark and an exclamation mark as well."""
    rest = text
    for mark in ("?!", "!?"):
        if mark in rest:
            rest = rest.replace(mark, "", 1)
            break
    return (rest != text or "‽" in text) and {*".,!?;:"} <= {*rest}


def _words_japanese(text: str, args: InstructionArguments) -> bool:
    """Every N-th word is Japanese; numbers may be anything."""
    nth = args.number("N")
    if nth < 1:
        raise ValueError("count:words_japanese: N must be 1 at least")
    words = [word.strip(_MARKS) for word in text.split()[nth - 1 :: nth]]
    return all(_JAPANESE.search(word) for word in words if word and not word.isdigit())


def _pronouns(text: str, args: InstructionArguments) -> bool:
    """There are at least N pronouns."""
    words = tokens(text.replace("/", " ").lower())
    return sum(word in _PRONOUNS for word in words) >= args.number("N")


def _keywords_multiple(text: str, args: InstructionArguments) -> bool:
    """The five keywords occur exactly once, twice, three, five and seven times."""
    wanted = {"keyword1": 1, "keyword2": 2, "keyword3": 3, "keyword4": 5, "keyword5": 7}
    return all(
        len(re.findall(rf"\b{re.escape(args.text(name).strip())}\b", text, re.I)) == count
        for name, count in wanted.items()
    )


def _alphabet(text: str, args: InstructionArguments) -> bool:
    """Each word begins with the letter that follows the first letter of the word before; a follows
    z."""
    initials = [word[0] for word in words_of(text)]
    if not initials or not "a" <= initials[0] <= "z":
        return False
    first = ord(initials[0]) - ord("a")
    return all(ord(letter) - ord("a") == (first + at) % 26 for at, letter in enumerate(initials))


def _vowel(text: str, args: InstructionArguments) -> bool:
    """The text is one paragraph with at most three different vowels."""
    return "\n" not in text.strip() and len({*text.lower()} & {*"aeiou"}) <= 3


def _consonants(text: str, args: InstructionArguments) -> bool:
    """Every word has two consonants in a row."""
    return all(_CONSONANTS.search(word) for word in text.lower().split())


def _alliteration(text: str, args: InstructionArguments) -> bool:
    """Each sentence has more words in runs with the same first letter than the sentence before."""
    before = -1
    for sentence in sentences(text):
        words = [word.lstrip(_MARKS) for word in sentence.lower().split()]
        firsts = [word[0] for word in words if word]
        same = [a == b for a, b in itertools.pairwise(firsts)]
        runs = sum(is_same and not (at and same[at - 1]) for at, is_same in enumerate(same))
        if sum(same) + runs <= before:
            return False
        before = sum(same) + runs
    return True


def _palindrome(text: str, args: InstructionArguments) -> bool:
    """There are at least ten palindromes of five letters or more."""
    return sum(word == word[::-1] and len(word) >= 5 for word in words_of(text)) >= 10


def _prime_lengths(text: str, args: InstructionArguments) -> bool:
    """The number of letters of every word is prime."""
    return all(len(word) in _PRIMES for word in text.translate(_NO_MARKS).split())


def _repeats(text: str, args: InstructionArguments) -> bool:
    """No word occurs more than `small_n` times."""
    return max(Counter(words_of(text)).values(), default=0) <= args.number("small_n")


def _nth(items: list[str], index: int) -> str | None:
    """Return the item at an index that counts from 1; None if there is none."""
    return items[index - 1] if 1 <= index <= len(items) else None


def _keyword(text: str, args: InstructionArguments) -> bool:
    """Sentence N contains the word."""
    sentence = _nth(sentences(text), args.number("N"))
    word = re.escape(args.text("word"))
    return sentence is not None and re.search(rf"\b{word}\b", sentence, re.I) is not None


def _specific_position(text: str, args: InstructionArguments) -> bool:
    """Word m of sentence n is the keyword."""
    sentence = _nth(sentences(text), args.number("n"))
    word = None if sentence is None else _nth(_word_tokens(sentence), args.number("m"))
    return word is not None and word.lower() == args.text("keyword").strip().lower()


def _words_position(text: str, args: InstructionArguments) -> bool:
    """The second word and the last but one are the keyword."""
    words = [word.lower() for word in _word_tokens(text)]
    return len(words) > 1 and words[1] == words[-2] == args.text("keyword").strip().lower()


def _last_first(text: str, args: InstructionArguments) -> bool:
    """The last word of each sentence is the first of the next."""
    texts = sentences(text)
    for sentence, following in itertools.pairwise(texts):
        last, first = sentence.rstrip(_MARKS).split()[-1:], following.lstrip(_MARKS).split()[:1]
        if not last or not first or last[0].lower() != first[0].lower():
            return False
    return True


def _paragraph_last_first(text: str, args: InstructionArguments) -> bool:
    """Each paragraph ends with its first word."""
    lines = [line.strip().strip(_MARKS).split() for line in text.lower().split("\n")]
    return all(words[0] == words[-1] for words in lines if words)


def _increment(text: str, args: InstructionArguments) -> bool:
    """Each sentence has `small_n` words more than the sentence before."""
    counts = [len(words_of(sentence)) for sentence in sentences(text)]
    more = args.number("small_n")
    return all(b == a + more for a, b in itertools.pairwise(counts))


def _no_consecutive(text: str, args: InstructionArguments) -> bool:
    """No two words in a row begin with the same letter."""
    firsts = [word[0] for word in words_of(text)]
    return all(a != b for a, b in itertools.pairwise(firsts))


WORDS: Mapping[str, Callable[[str, InstructionArguments], bool]] = {
    "count:word_count_range": _word_count_range,
    "count:unique_word_count": _unique_word_count,
    "count:conjunctions": _conjunctions,
    "count:person_names": _person_names,
    "count:numbers": _numbers,
    "count:punctuation": _punctuation,
    "count:words_japanese": _words_japanese,
    "count:pronouns": _pronouns,
    "count:keywords_multiple": _keywords_multiple,
    "ratio:stop_words": _stop_words,
    "ratio:sentence_type": _sentence_type,
    "ratio:sentence_balance": _sentence_balance,
    "ratio:sentence_words": _sentence_words,
    "ratio:overlap": _overlap,
    "words:alphabet": _alphabet,
    "words:vowel": _vowel,
    "words:consonants": _consonants,
    "words:palindrome": _palindrome,
    "words:prime_lengths": _prime_lengths,
    "words:repeats": _repeats,
    "words:last_first": _last_first,
    "words:paragraph_last_first": _paragraph_last_first,
    "words:no_consecutive": _no_consecutive,
    "words:keywords_specific_position": _specific_position,
    "words:words_position": _words_position,
    "sentence:alliteration_increment": _alliteration,
    "sentence:keyword": _keyword,
    "sentence:increment": _increment,
}
"""The checks by the ids of their instructions."""
