r"""Repairs grammars in the EBNF that xgrammar prints. The compiler calls `keep_literals`.

xgrammar writes control characters and U+0080 to U+00FF as \xNN, and reads hexadecimal digits that
follow as part of the number: a schema's "née" becomes "n" and U+0E9E. So every grammar is printed,
its strings are cut after such escapes, and it is read again. How xgrammar prints is not documented;
`check_print` detects a version that prints differently.
"""

import re
from importlib.metadata import version
from typing import Any

from batchgen.engine.interface.constraint_error import ConstraintError

TESTED_VERSION = "0.2.8"
"""The version of xgrammar that the tests ran with. constraints.txt pins the same version."""

_STRING_OR_CLASS = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')
_ESCAPE = re.compile(r"(\\x[0-9a-f]{2}(?=[0-9a-fA-F]))|\\.")
_TAGS = "TagDispatch("
"""The beginning of the rule of a structural tag with triggers. Strings in it cannot be cut."""

_PROBE = 'root ::= "né1\\n\\"\\\\" [^éa\\]\\n] | "日"\n'
_PROBE_PRINTED = r'root ::= (("n\xe91\n\"\\" [^\xe9a\]\n]) | ("\u65e5"))' + "\n"
_TAG_PROBE = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<é"],
        "tags": [
            {
                "type": "tag",
                "begin": "<é1>",
                "content": {"type": "const_string", "value": "a"},
                "end": ">",
            }
        ],
    },
}
_TAG_PROBE_PRINTED = _TAGS + '\n  ("<\\xe9", '


def check_print() -> None:
    """Raise ConstraintError if the installed xgrammar prints grammars in a form that
    `keep_literals` cannot read."""
    from xgrammar import Grammar

    try:
        printed = str(Grammar.from_ebnf(_PROBE)) == _PROBE_PRINTED
        tags = _TAG_PROBE_PRINTED in str(Grammar.from_structural_tag(_TAG_PROBE))
    except RuntimeError:  # xgrammar's own errors: it does not even read the probes
        printed = tags = False
    if not (printed and tags):
        raise ConstraintError(
            f"the installed xgrammar {version('xgrammar')} prints grammars in another way than "
            f"{TESTED_VERSION}, which constraints were tested with, and might let wrong text "
            f"through: install the tested one with `pip install xgrammar=={TESTED_VERSION}`, or "
            "run the job without a constraint"
        )


def keep_literals(grammar: Any) -> Any:
    r"""Return an `xgrammar.Grammar` with every string split in two after an escape \xNN that a
    hexadecimal digit follows, so that xgrammar does not read the digit as part of the escape.
    Returns the grammar itself if it has no such string. Raises ConstraintError if the string is in
    a structural tag, where it cannot be split."""
    from xgrammar import Grammar

    printed = str(grammar)
    cut = _STRING_OR_CLASS.sub(_cut, printed)
    if cut == printed:
        return grammar
    if _TAGS in printed:
        raise ConstraintError(
            "a structural tag has a string with a character from U+0080 to U+00FF before a digit or"
            " a letter from a to f, which xgrammar misreads: write its tags in ASCII"
        )
    return Grammar.from_ebnf(cut)


def _cut(match: re.Match[str]) -> str:
    """Cut an EBNF string after escapes before digits. Character classes need no cut."""
    if match[0].startswith("["):
        return match[0]
    return _ESCAPE.sub(lambda escape: escape[0] + '" "' if escape[1] else escape[0], match[0])
