r"""SplitPattern: a tokenizer's split regex in the standard library's `re`, for text where the two provably agree.

`tokenizers` splits with Oniguruma, whose `\p{L}` and `\s` follow its own version of Unicode. `re` has no `\p{…}`, but
its classes can be written out. There are two translations: one for ASCII, and one for the *settled* characters, whose
category has not changed since Unicode 3.2; text with any other character is left to the library. A pattern with syntax
whose meaning might differ between the two engines is not translated.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain

ASCII_LIMIT = 0x80
BMP_LIMIT = 0x10000
EMOJI = (range(0x1F300, 0x1F650), range(0x1F680, 0x1F6C6))
"""Assigned in Unicode 6 and 7 and frequent in chats, so an exception to the 3.2 rule."""

FOLDING_INTO_ASCII = frozenset({0x130, 0x131, 0x17F, 0x212A})
"""Letters whose case folds to or from an ASCII letter: `(?i:'s)` may match them in one engine and not in the other."""

NOTHING = "\U0010ffff"
"""Member of classes without settled characters: a noncharacter, itself not settled."""

SPACES = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
SPACES_ASCII = "\t\n\x0b\x0c\r "

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Split pattern of `ByteLevel` with `use_regex`."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CONTRACTIONS_FACTORED = r"(?:'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL]))"
"""The same for settled characters, with all but one alternative rejected by its first character: a third faster."""

Classes = Callable[[str], str]
"""Function from a property (`L`, `Lu`, …) or `s` to the inside of a bracket."""


def ascii_pattern(source: str) -> "re.Pattern[str] | None":
    """Return the pattern for ASCII text, None if it cannot be translated."""
    return _compile(source, lambda name: SPACES_ASCII if name == "s" else _members(name, (range(ASCII_LIMIT),)))


def settled_pattern(source: str) -> "re.Pattern[str] | None":
    """Return the pattern for text of settled characters, None if it cannot be translated."""
    return _compile(source, lambda name: SPACES if name == "s" else _members(name, settled()))


@cache
def unsettled() -> "re.Pattern[str]":
    """Return a pattern that matches a character that only the library may encode."""
    return re.compile(f"[^{_bracket(settled())}]")


@cache
def settled() -> tuple[range, ...]:
    """Return the code points whose category and normalization are the same in every version of Unicode since 3.2.

    They are spans in ascending order: as single numbers they would take four megabytes.
    """
    old, new = unicodedata.ucd_3_2_0.category, unicodedata.category
    codes = (code for code in range(BMP_LIMIT) if old(chr(code)) == new(chr(code)) not in ("Cn", "Cs", "Co"))
    emoji = (code for block in EMOJI for code in block if new(chr(code)) != "Cn")
    return tuple(_spans(code for code in chain(codes, emoji) if code not in FOLDING_INTO_ASCII))


OTHER, LETTER, NUMBER, MARK, SPACE, NEWLINE = 1, 2, 4, 8, 16, 32
"""Classes of characters; the compiled encoder has the same numbers."""


@cache
def character_classes() -> bytes:
    """Return the class of each code point up to the last settled one; 0 for characters that are not settled.

    It takes some 20 ms to make, and 128 KB.
    """
    spans = settled()
    classes = bytearray(spans[-1].stop)
    kinds = {"L": LETTER, "N": NUMBER, "M": MARK}
    is_space = re.compile(f"[{SPACES}]").match
    for span in spans:
        for code in span:
            char = chr(code)
            kind = unicodedata.category(char)[0]
            classes[code] = kinds.get(kind, OTHER)
            if kind in "ZC" and is_space(char):  # A separator or a control character.
                classes[code] = NEWLINE if char in "\r\n" else SPACE
    return bytes(classes)


def _members(name: str, spans: Iterable[range]) -> str:
    codes = (code for span in spans for code in span)
    return _bracket(_spans(code for code in codes if unicodedata.category(chr(code)).startswith(name))) or NOTHING


def _spans(codes: Iterable[int]) -> Iterator[range]:
    """Yield the longest runs of ascending code points."""
    start = end = -1
    for code in codes:
        if code != end:
            if start >= 0:
                yield range(start, end)
            start = code
        end = code + 1
    if start >= 0:
        yield range(start, end)


def _bracket(spans: Iterable[range]) -> str:
    """Return spans as the inside of a bracket."""
    return "".join(f"\\U{span[0]:08x}-\\U{span[-1]:08x}" for span in spans)


# ---- translation ----------------------------------------------------------------------------------------------------

TOKEN = re.compile(
    r"""
      \\p\{(?P<property>L[ultmo]?|N[dlo]?|M[nce]?|P[cdseifo]?|S[mcko]?)\}
    | \\(?P<space>[sS])
    | (?P<escape>\\[rntfv'"/\\.+*?()|\[\]{}^$-])
    | (?P<group>\((?:\?(?:i?:|[!=]))) | (?P<close>\))
    | (?P<counted>\{\d+(?:,\d*)?\}(?![+*?]))
    | (?P<quantifier>[+*?])
    | (?P<open>\[\^?) | (?P<shut>\])
    | (?P<literal>[^\\\[\](){}^$.&+*?])
    """,
    re.VERBOSE | re.DOTALL,
)
"""Syntax with equal meaning in both engines. Never translated: `.`, `^`, `$`, capturing groups, `&&`, look-behind."""


def _compile(source: str, classes: Classes) -> "re.Pattern[str] | None":
    text = _translate(source.replace(CONTRACTIONS, CONTRACTIONS_FACTORED), classes)
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error:
        return None


def _translate(source: str, classes: Classes) -> str | None:
    parts: list[str] = []
    at, is_inside = 0, False
    while at < len(source):
        token = TOKEN.match(source, at)
        if token is None:
            return None
        at = token.end()
        kind, text = token.lastgroup, token[0]
        if kind in ("open", "shut"):
            if (kind == "open") == is_inside:
                return None  # A class inside a class, or an unmatched closing bracket.
            is_inside = not is_inside
        elif kind == "property":
            text = classes(token["property"])
            text = text if is_inside else f"[{text}]"
        elif kind == "space":
            is_negated = token["space"] == "S"
            if is_inside and is_negated:
                return None
            text = classes("s") if is_inside else f"[{'^' if is_negated else ''}{classes('s')}]"
        parts.append(text)
    return None if is_inside else "".join(parts)
