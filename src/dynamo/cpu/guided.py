"""Guide: token masks for requests with a constrained output format (docs/structured-output.md).

    grammars = Grammars(model_path, vocab_size)
    guide = grammars.compile(GuidedDecoding(regex="[0-9]+"), key).fresh()    # compiling is slow: in a thread
    guide.allowed(end_ids=[2])                                               # a bool for each token
    guide.take(token)

Grammars are compiled by `llguidance`. Compiled grammars are cached; each choice gets a copy in its initial state.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.cpu.json_lengths import JsonLengths, TokenStarts
from dynamo.cpu.structural_tag import Rules, translate
from dynamo.protocols.engine import GuidedDecoding
from dynamo.text.tokenizer.tokenizer import Tokenizer

Bools = npt.NDArray[np.bool_]

GRAMMARS_MAX = 128  # A few kB to a few MB each; a service has a handful of schemas.
BYTES_MAX = 1 << 20  # Size of a constraint as JSON: far larger than a hand-written one, and compiled within a second.
ERROR_CHARS_MAX = 500  # A compiler's message may quote the whole grammar.
WHITESPACE = " "  # Maximum between JSON tokens: each costs a step, and a small model would repeat them endlessly.
GAP = r"[ \n]{0,4}"  # Between the reasoning and the answer.
LIMITS = LLParserLimits(
    verbose_errors=False
)  # The library's defaults, which abort an intractable grammar within a second.

PLAIN_BYTES_MAX = 4096  # As JSON; a simple schema of that size takes up to 50 ms.
PLAIN_KEYWORDS = frozenset({
    "$schema", "additionalProperties", "anyOf", "const", "default", "description", "enum", "examples", "items",
    "properties", "required", "title", "type",
})  # fmt: skip
"""Keywords of schemas that compile in time and memory proportional to their size."""

PARAM = "guided_decoding"

FIELDS = {"json": "JSON schema", "regex": "regular expression", "choice": "choice", "grammar": "grammar"}


class Guide:
    """Position of one choice in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, lengths: JsonLengths | None = None) -> None:
        """`lengths` limits numbers and strings if the text is or contains JSON."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._lengths = lengths

    def fresh(self) -> "Guide":
        """Return a copy of the grammar in its initial state; requires that no token was taken."""
        lengths = None if self._lengths is None else self._lengths.fresh()
        return Guide(self._matcher.deep_copy(), self._vocab_size, lengths)

    def allowed(
        self, end_ids: Collection[int], forbidden: Collection[int] = (), listed: Bools | None = None
    ) -> Bools | None:
        """Return a mask of the tokens that may come next; None if the text is complete and cannot continue.

        `end_ids` are the end tokens of the request: allowed where the text may end, and nowhere else. Tokens in `forbidden` and
        tokens outside `listed` are never allowed. Raises `InvalidArgument` if the grammar is too complex.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        bits = np.unpackbits(mask, count=self._vocab_size + 1, bitorder="little").view(np.bool_)
        allowed, may_end = bits[:-1], bool(bits[-1])
        if self._lengths is not None:
            allowed = self._lengths.limited(allowed, may_end=may_end)
        if end_ids:
            allowed[list(end_ids)] = may_end
        if forbidden:
            allowed[list(forbidden)] = False
        if listed is not None:
            allowed &= listed
        if allowed.any():
            return allowed
        if may_end:
            return None
        raise InvalidArgument("guided decoding: no token fits the grammar here", param=PARAM)

    def measure(self) -> None:
        """Compute the first mask, as a step does. Raise `InvalidArgument` if the grammar is too complex."""
        self._matcher.compute_bitmask()
        self._check()

    def take(self, token: int) -> None:
        """Advance by the chosen token. Raise `InvalidArgument` if the grammar is too complex."""
        self._matcher.consume_token(token)
        if self._lengths is not None:
            self._lengths.take(token)
        self._check()

    @property
    def is_complete(self) -> bool:
        """Return whether the text matches and cannot be extended."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidArgument(f"guided decoding: {_error_of(self._matcher)}", param=PARAM)


class Grammars:
    """LRU cache of one model's compiled grammars. Thread-safe."""

    def __init__(self, model_path: str, vocab_size: int) -> None:
        """The model's tokenizer is loaded on first use."""
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Guide] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        self._markers: dict[str, int] = {}
        self._starts: TokenStarts | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def kept(self, key: bytes) -> Guide | None:
        """Return a cached grammar, or None."""
        with self._lock:
            guide = self._kept.get(key)
            if guide is not None:
                self._kept.move_to_end(key)
            return guide

    def compile(
        self, guided: GuidedDecoding, key: bytes, thoughts_end: str | None = None, *, is_kept: bool = True
    ) -> Guide:
        """Compile a grammar as `compiled` does and, if `is_kept`, cache it."""
        guide = self.compiled(guided, thoughts_end)
        if is_kept:
            with self._lock:
                self._kept[key] = guide
                while len(self._kept) > GRAMMARS_MAX:
                    self._kept.popitem(last=False)
        return guide

    def compiled(self, guided: GuidedDecoding, thoughts_end: str | None = None) -> Guide:
        """Compile a grammar: milliseconds to seconds. Raise `InvalidArgument` with the reason if it is invalid.

        With `thoughts_end`, any text up to that marker may come first.
        """
        tokenizer = self.ready()
        grammar = grammar_of(guided, self._markers)
        if thoughts_end is not None:
            grammar = after_thoughts(grammar, thoughts_end, self._markers)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise InvalidArgument(f"{named(guided)}: {_error_of(matcher)}", param=param_of(guided))
        has_json = guided.json is not None or guided.structural_tag is not None
        lengths = JsonLengths(self._starts) if has_json and self._starts is not None else None
        return Guide(matcher, self._vocab_size, lengths)

    def ready(self) -> LLTokenizer:
        """Return the vocabulary in the library's form. It is built on first use, which may take a second."""
        with self._lock:
            if self._tokenizer is None:
                try:
                    tokenizer = Tokenizer.from_dir(self._model_path, backends=())
                except ConfigError as error:
                    raise InvalidArgument(f"guided decoding needs a tokenizer: {error}", param=PARAM) from None
                self._markers = tokenizer.markers()
                vocabulary = Vocabulary(tokenizer, self._vocab_size)
                self._starts = TokenStarts.of(vocabulary.tokens[: self._vocab_size])
                self._tokenizer = LLTokenizer(vocabulary, slices=None)
            return self._tokenizer


class Vocabulary(TokenizerWrapper):
    """The model's tokens as bytes, plus one end-of-text token that represents all end ids of a request."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._encode = tokenizer.encode
        known = tokenizer.token_bytes()[:size]
        self.tokens = [*known, *[b""] * (size - len(known)), b"<|the end|>"]
        self.special_token_ids = sorted(
            {*(one for one in tokenizer.markers().values() if one < size), *range(len(known), size), size}
        )
        self.eos_token_id = size
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text, as split by the model's tokenizer."""
        return self._encode(text)


def key_of(guided: GuidedDecoding, thoughts_end: str | None) -> bytes:
    """Return the cache key of a grammar. Raise `InvalidArgument` for a constraint that is too large."""
    key = msgspec.json.encode((guided, thoughts_end))
    if len(key) > BYTES_MAX:
        raise InvalidArgument(
            f"{named(guided)}: has {len(key)} bytes; the limit is {BYTES_MAX}", param=param_of(guided)
        )
    return key


def is_plain(guided: GuidedDecoding, key: bytes) -> bool:
    """Return whether a constraint is so small and simple that compiling it takes milliseconds.

    Patterns, counts, references and intersections of schemas can make a short grammar take any time and memory.
    """
    if len(key) > PLAIN_BYTES_MAX or guided.whitespace_pattern is not None:
        return False
    if guided.choice is not None:
        return True
    if not isinstance(guided.json, dict) or any(getattr(guided, field) for field in FIELDS if field != "json"):
        return False
    waiting: list[Any] = [guided.json]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict) or not PLAIN_KEYWORDS.issuperset(schema):
            return False
        properties, choices = schema.get("properties", {}), schema.get("anyOf", [])
        if not isinstance(properties, dict) or not isinstance(choices, list):
            return False
        waiting += [*properties.values(), *choices]
        waiting += [schema[key] for key in ("items", "additionalProperties") if key in schema]
    return True


def param_of(guided: GuidedDecoding) -> str:
    """Return the request field of the constraint."""
    return next((f"guided_{field}" for field in FIELDS if getattr(guided, field) is not None), "structural_tag")


def named(guided: GuidedDecoding) -> str:
    """Return a name of the constraint for error messages."""
    return next((words for field, words in FIELDS.items() if getattr(guided, field) is not None), "structural tag")


def grammar_of(guided: GuidedDecoding, markers: Mapping[str, int]) -> str:
    """Translate the constraint into an llguidance grammar. Raise `InvalidArgument`."""
    try:
        if guided.json is not None:
            return json_grammar(guided.json, guided.whitespace_pattern)
        if guided.regex is not None:
            return str(LLMatcher.grammar_from_regex(guided.regex))
        if guided.choice is not None:
            return str(LLMatcher.grammar_from_regex("|".join(map(re.escape, guided.choice))))
        if guided.grammar is not None:
            return lark(any_to_lark(guided.grammar))
    except InvalidArgument:
        raise
    except Exception as error:  # noqa: BLE001 - the library's translators raise many types for invalid input
        raise InvalidArgument(f"{named(guided)}: {str(error)[:ERROR_CHARS_MAX]}", param=param_of(guided)) from None
    rules = Rules(markers, guided.whitespace_pattern or WHITESPACE)
    body = translate(guided.structural_tag, rules)
    return container("\n".join([f"start: {body}", *rules.lines]), *rules.grammars)


def json_grammar(schema: Any, whitespace_pattern: str | None) -> str:
    """Return the grammar of a JSON value with a schema, given as an object or as JSON text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise InvalidArgument(f"JSON schema: invalid JSON: {error}", param="guided_json") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidArgument("JSON schema: expected an object", param="guided_json")
    pattern = whitespace_pattern or WHITESPACE
    return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": pattern}))


def lark(text: str) -> str:
    """Return a grammar of one Lark text."""
    return container(text)


def container(text: str, *more: dict[str, Any]) -> str:
    """Return a grammar together with the grammars that it refers to by name."""
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": text}, *more]})


def after_thoughts(grammar: str, thoughts_end: str, markers: Mapping[str, int]) -> str:
    """Return a grammar preceded by reasoning text that ends with a marker."""
    first, *more = json.loads(grammar)["grammars"]
    rules = Rules(markers, WHITESPACE)
    body = f"{rules.text_until(thoughts_end)} {rules.pattern(GAP)} @answer"
    return container("\n".join([f"start: {body}", *rules.lines]), first | {"name": "answer"}, *more)


def _error_of(matcher: LLMatcher) -> str:
    """Return the error of a failed matcher, without the grammar text around it."""
    return " ".join(str(matcher.get_error()).split())[:ERROR_CHARS_MAX]
