"""StructuralTag: translate structural tags, text with constrained parts, into llguidance grammars. Pure.

    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [...]}}

    start: (n2 n3)* n4
    n2[suffix="<f"]: n1        free text up to the trigger
    n3: "=now>" %json {…} "</f>"

Markers that are single tokens of the tokenizer are required as tokens: a model that was trained on `<tool_call>` generates
it as one token and not letter by letter.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dynamo.core.errors import InvalidArgument

PARAM = "structural_tag"
DEPTH_MAX = 32  # Formats within formats; real ones are four deep.
WORD = r"[A-Za-z_][A-Za-z0-9_.-]*"
TEXT = r"(.|\n)*"


def refuse(what: str) -> InvalidArgument:
    """Return the error for an invalid structural tag."""
    return InvalidArgument(f"structural_tag: {what}", param=PARAM)


def format_of(tag: Any) -> dict[str, Any]:
    """Return the outermost format of a tag in either form, given as object or JSON text. Raise `InvalidArgument`."""
    if isinstance(tag, str):
        try:
            tag = json.loads(tag)
        except ValueError as error:
            raise refuse(f"invalid JSON: {error}") from None
        except RecursionError:
            raise refuse("it is nested too deeply") from None
    if not isinstance(tag, dict):
        raise refuse("expected an object")
    if "format" in tag:
        inner = tag["format"]
        if not isinstance(inner, dict):
            raise refuse("`format` must be an object")
        return inner
    if "structures" in tag:
        structures = _list_of(tag, "structures", dict)
        tags = [
            {
                "type": "tag",
                "begin": one.get("begin"),
                "content": {"type": "json_schema", "json_schema": one.get("schema", True)},
                "end": one.get("end", ""),
            }
            for one in structures
        ]
        return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    raise refuse("expected `format`, or `structures` with `triggers`")


class Rules:
    """Rules of one grammar, added during translation."""

    def __init__(self, markers: Mapping[str, int], whitespace: str) -> None:
        """`markers`: token ids of texts that are single tokens; `whitespace`: the pattern allowed between JSON tokens."""
        self.lines: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        """Grammars that rules refer to with @."""
        self._markers = markers
        self._whitespace = whitespace
        self._split = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True)))) if markers else None
        self._text: str | None = None

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule; return its name."""
        name = f"n{len(self.lines) + 1}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Return the expression for exactly this text, with markers as tokens."""
        return " ".join(piece for piece, _ in self._pieces(text)) or '""'

    def json(self, schema: Any) -> str:
        """Return the expression for a JSON value of a schema."""
        if schema is False:
            raise refuse("no value matches the schema `false`")
        if not isinstance(schema, dict | bool):
            raise refuse("`json_schema` must be a schema: an object, or `true`")
        options = {"x-guidance": {"whitespace_pattern": self._whitespace}}
        return f"%json {json.dumps((schema if isinstance(schema, dict) else {}) | options)}"

    def pattern(self, pattern: str) -> str:
        """Return the expression for text that matches a regular expression."""
        from llguidance import regex_to_lark  # Imported only when guided decoding is used.

        return f"/{regex_to_lark(pattern)}/"

    def grammar(self, text: str) -> str:
        """Add a separate grammar; return a reference to it."""
        name = f"g{len(self.grammars) + 1}"
        self.grammars.append({"name": name, "lark_grammar": text})
        return f"@{name}"

    def text(self, without: Sequence[str] = ()) -> str:
        """Return the expression for any text without markers and without the given strings."""
        plain = [one for one in without if one and one not in self._markers]
        if plain:
            banned = "|".join(map(re.escape, plain))
            name = f"T{len(self.lines) + 1}"
            self.lines.append(f"{name}: /{TEXT}/ & ~/{TEXT}({_slashed(banned)}){TEXT}/")
            return self.rule(name)
        if self._text is None:
            self._text = self.rule(f"/{TEXT}/")
        return self._text

    def text_until(self, end: str, without: Sequence[str] = ()) -> str:
        """Return the expression for any text up to and including the first `end`."""
        pieces = self._pieces(end)
        if not pieces:
            return self.text(without)
        (first, is_marker), rest = pieces[0], " ".join(piece for piece, _ in pieces[1:])
        if is_marker:
            return f"{self.text(without)} {first} {rest}"
        stopped = [one for one in without if one not in end]
        body = f"/{TEXT}/" if not stopped else self._terminal(stopped)
        return f"{self.rule(body, f'[suffix={first}]')} {rest}"

    def _terminal(self, without: Sequence[str]) -> str:
        self.text(without)
        return self.lines[-1].partition(": ")[2]

    def _pieces(self, text: str) -> list[tuple[str, bool]]:
        """Split the text into quoted strings and marker tokens, in order."""
        pieces: list[tuple[str, bool]] = []
        at = 0
        for found in self._split.finditer(text) if self._split else ():
            if found.start() > at:
                pieces.append((json.dumps(text[at : found.start()]), False))
            pieces.append((f"<[{self._markers[found.group()]}]>", True))
            at = found.end()
        if at < len(text):
            pieces.append((json.dumps(text[at:]), False))
        return pieces


def translate(tag: Any, rules: Rules) -> str:
    """Return the body of the rule for the whole text. Raise `InvalidArgument` that names an unsupported part."""
    return _format(format_of(tag), rules, 0)


def _format(given: Any, rules: Rules, depth: int) -> str:
    if not isinstance(given, dict):
        raise refuse("a format must be an object")
    if depth > DEPTH_MAX:
        raise refuse("it is nested too deeply")
    kind = given.get("type")
    if kind == "const_string":
        return rules.literal(_string(given, "value"))
    if kind == "json_schema":
        return _schema(given, rules)
    if kind == "regex":
        return rules.pattern(_string(given, "pattern"))
    if kind == "grammar":
        return rules.grammar(_string(given, "grammar"))
    if kind == "any_text":
        return rules.text(_strings(given, "excludes"))
    if kind == "tag":
        return _tag(given, rules, depth, skipped=0)
    if kind == "triggered_tags":
        return _triggered(given, rules, depth)
    if kind == "tags_with_separator":
        return _separated(given, rules, depth)
    if kind == "sequence":
        return _sequence(_list_of(given, "elements", dict), rules, depth)
    if kind == "or":
        return _any_of((_format(one, rules, depth + 1) for one in _list_of(given, "elements", dict)), rules)
    if kind in REPEATS:
        return f"({rules.rule(_format(given.get('content'), rules, depth + 1))}){REPEATS[kind]}"
    raise refuse(f"formats of type {kind!r} are not supported; supported: {', '.join(KINDS)}")


REPEATS = {"optional": "?", "star": "*", "plus": "+"}
KINDS = (
    "const_string", "json_schema", "regex", "grammar", "any_text", "tag", "triggered_tags", "tags_with_separator",
    "sequence", "or", *REPEATS,
)  # fmt: skip


def _sequence(elements: Sequence[dict[str, Any]], rules: Rules, depth: int) -> str:
    for one in elements[:-1]:
        if one.get("type") == "any_text":
            raise refuse("`any_text` must be alone in a tag or at the end of a sequence")
    return " ".join(_format(one, rules, depth + 1) for one in elements)


def _tag(given: Mapping[str, Any], rules: Rules, depth: int, skipped: int) -> str:
    """Return the rest of a tag after its first `skipped` characters."""
    begin, end, content = _string(given, "begin"), given.get("end", ""), given.get("content")
    if not isinstance(end, str):
        raise refuse("`end` of a tag must be a string")
    opening = rules.literal(begin[skipped:]) if begin[skipped:] else ""
    if isinstance(content, dict) and content.get("type") == "any_text":
        return f"{opening} {rules.text_until(end, _strings(content, 'excludes'))}"
    inner = rules.rule(_format(content, rules, depth + 1))
    return f"{opening} {inner} {rules.literal(end) if end else ''}"


def _triggered(given: Mapping[str, Any], rules: Rules, depth: int) -> str:
    """Return free text in which a trigger begins a tag."""
    triggers, tags = _strings(given, "triggers"), _list_of(given, "tags", dict)
    if not triggers or not tags or "" in triggers:
        raise refuse("`triggers` and `tags` must not be empty")
    excludes = _strings(given, "excludes")
    ways = []
    for trigger in triggers:
        mine = [tag for tag in tags if _string(tag, "begin").startswith(trigger)]
        if mine:
            rest = _any_of((_tag(tag, rules, depth + 1, len(trigger)) for tag in mine), rules)
            ways.append(f"{rules.text_until(trigger, excludes)} {rest}")
    stray = [tag for tag in tags if not _string(tag, "begin").startswith(tuple(triggers))]
    if stray:
        raise refuse(f"no trigger begins the tag {stray[0]['begin'][:80]!r}")
    later = _any_of(ways, rules)
    tail = rules.text([*triggers, *excludes])
    is_once = given.get("stop_after_first") is True
    if given.get("at_least_one") is True:
        first = _any_of((_tag(tag, rules, depth + 1, 0) for tag in tags), rules)
        return first if is_once else f"{first} {later}* {tail}"
    return f"({later} | {tail})" if is_once else f"{later}* {tail}"


def _separated(given: Mapping[str, Any], rules: Rules, depth: int) -> str:
    """Return tags separated only by a separator."""
    tags = _list_of(given, "tags", dict)
    if not tags:
        raise refuse("`tags` must not be empty")
    one = _any_of((_tag(tag, rules, depth + 1, 0) for tag in tags), rules)
    separator = given.get("separator", "")
    if not isinstance(separator, str):
        raise refuse("`separator` must be a string")
    between = f"{rules.literal(separator)} " if separator else ""
    body = one if given.get("stop_after_first") is True else f"{one} ({between}{one})*"
    return body if given.get("at_least_one") is True else f"({body})?"


def _any_of(bodies: Iterable[str], rules: Rules) -> str:
    return rules.rule(" | ".join(bodies))


# ---- arguments in formats other than JSON --------------------------------------------------------------------------

STYLES: Mapping[str, tuple[str, str, str, str]] = {
    "qwen_xml": ("<parameter={}>\n", "\n</parameter>", "\n", ""),
    "glm_xml": ("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>", "\n", ""),
    "deepseek_xml": ('<｜DSML｜parameter name="{}" string="{}">', "</｜DSML｜parameter>\n", "", "true"),
}
"""Per style: begin of a parameter (with its name and, for some styles, whether the value is bare text), end of a
parameter, separator, and the attribute of a value of unknown type."""


def _schema(given: Mapping[str, Any], rules: Rules) -> str:
    style, schema = given.get("style", "json"), given.get("json_schema", True)
    if style == "json":
        return rules.json(schema)
    if style not in STYLES:
        raise refuse(f"style {style!r} is not supported; supported: json, {', '.join(STYLES)}")
    if schema is False:
        raise refuse("no value matches the schema `false`")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return _free_parameters(style, rules)
    required = schema.get("required") or ()
    begin, end, between, _ = STYLES[style]
    parts = []
    for name, one in properties.items():
        is_text = isinstance(one, dict) and one.get("type") == "string"
        opening = begin.format(name, str(is_text).lower())
        if is_text and isinstance(one.get("enum"), list):
            value = _any_of((rules.literal(str(word)) for word in one["enum"]), rules) + f" {rules.literal(end)}"
        elif is_text:
            value = rules.text_until(end)
        else:
            value = f"{rules.json(_with_definitions(one, schema))} {rules.literal(end)}"
        value = rules.rule(value)
        parts.append(
            (f"{rules.literal(opening)} {value}", f"{rules.literal(between + opening)} {value}", name in required)
        )
    return _in_order(parts, rules)


def _in_order(parts: Sequence[tuple[str, str, bool]], rules: Rules) -> str:
    """Return parameters in the order of the schema; optional ones may be omitted.

    Each is given in its form as first parameter and as later parameter. The separator is part of the latter's first
    text: the library matches greedily, and a separate separator could be the beginning of the text that ends the tag.
    """
    rest = '""'
    firsts: list[str] = []
    for first, later, is_needed in reversed(parts):
        option = rules.rule(f"{first} {rest}")
        firsts = [option] if is_needed else [option, *firsts]
        following = f"{later} {rest}"
        rest = rules.rule(following if is_needed else f"{following} | {rest}")
    if not any(is_needed for _, _, is_needed in parts):
        firsts.append('""')
    return _any_of(firsts, rules)


def _free_parameters(style: str, rules: Rules) -> str:
    """Return arbitrary parameters with text values, for a schema without properties."""
    begin, end, between, kind = STYLES[style]
    before, _, behind = begin.partition("{}")
    behind = behind.replace("{}", kind)
    value = rules.rule(f"{rules.pattern(WORD)} {rules.literal(behind)} {rules.text_until(end)}")
    return f"({rules.literal(before)} {value} ({rules.literal(between + before)} {value})*)?"


def _with_definitions(schema: Any, whole: Mapping[str, Any]) -> Any:
    """Return a part of a schema with the definitions of the whole schema, to which it may refer."""
    if not isinstance(schema, dict):
        return schema
    return {key: whole[key] for key in ("$defs", "definitions") if key in whole} | schema


# ---- reading ---------------------------------------------------------------------------------------------------------


def _string(given: Mapping[str, Any], key: str) -> str:
    value = given.get(key)
    if not isinstance(value, str):
        raise refuse(f"`{key}` must be a string")
    return value


def _strings(given: Mapping[str, Any], key: str) -> list[str]:
    value = given.get(key) or []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise refuse(f"`{key}` must be a list of strings")
    return value


def _list_of(given: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    value = given.get(key)
    if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
        raise refuse(f"`{key}` must be a list of objects")
    return value


def _slashed(pattern: str) -> str:
    """Escape a regular expression for use between slashes."""
    return pattern.replace("/", "\\/").replace("\n", "\\n")
