"""Tokenizer: text to ids and back, equal to the `tokenizers` library, with faster encoders where equality is tested.

`tokenizers` is the reference, and encodes all text that the faster encoders do not support. There are three of these,
tried in order: our own `compiled_words` for byte-level BPE if it is compiled, the `fastokens` library if installed, and
`word_tokenizer`, the first one in Python. Each is compared with the reference when a tokenizer is loaded, on a corpus made
for the purpose; an encoder that differs anywhere is not used, and a warning is logged. A cache of earlier texts
(`prefix_tokens`), tested in the same way, precedes them.
"""

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from dynamo.core.codec import UNREADABLE
from dynamo.core.config import setting
from dynamo.core.errors import ConfigError
from dynamo.model_card.card import ModelFiles, read_bytes
from dynamo.text.detokenizer import Decoding, TokenTable, text_json_of
from dynamo.text.tokenizer.choices import BACKEND_NAMES
from dynamo.text.tokenizer.compiled_words import compiled_words_for
from dynamo.text.tokenizer.fast_tokens import fast_tokens_for
from dynamo.text.tokenizer.prefix_tokens import BYTES_MAX, PrefixTokens, TooManyTokens, cuts_of
from dynamo.text.tokenizer.tiktoken_model import is_tiktoken, tokenizer_json
from dynamo.text.tokenizer.word_tokenizer import byte_of_char, word_tokenizer_for

DEFINITION = "tokenizers"
MODEL = "model"
"""Section of a `tokenizer.json` with the vocabulary and the merges."""

BACKENDS: Mapping[str, Callable[[dict[str, Any], bytes, Any], "Encoder | str"]] = {
    "compiled": lambda spec, data, _: compiled_words_for(spec, data),
    "fastokens": lambda _, data, __: fast_tokens_for(data),
    "words": lambda spec, data, model: word_tokenizer_for(with_model(spec, data), model),
}
"""Name to a factory, best first. Its arguments are a `tokenizer.json`, parsed and plain, and the library's model; it
returns an encoder or the reason why there is none. The parsed one may lack the vocabulary (`spec_of`)."""

logger = logging.getLogger(__name__)

LONG_CHARS = 8192  # Takes the library milliseconds, so the library must release the interpreter lock.

TOKENS_MAX = 1 << 20  # A list of so many ids takes some 10 ms.

SELF_TEST_SEED = 1337
SELF_TEST_TEXTS = 60

NOT_LATIN = "\uffff"  # Any character without a latin-1 byte.

META_SPACE = "\u2581"  # Space in sentencepiece.


class Encoder(Protocol):
    """A faster encoder with the library's results."""

    frees_the_interpreter: bool
    """Whether other threads run while it encodes a long text."""

    @property
    def cache_entries(self) -> int:
        """Number of cached words and stretches of text."""

    @property
    def cache_bytes(self) -> int:
        """Approximate memory of the cache."""

    @property
    def cache_hits(self) -> int:
        """Number of cache hits."""

    @property
    def cache_misses(self) -> int:
        """Number of cache misses."""

    def encode(self, text: str, most: int) -> list[int] | int | None:
        """Return the ids, without a template's additions, or only their number if there are more than `most`.

        Return None for text that only the library may encode.
        """


class Tokenizer:
    """One model's tokenizer."""

    def __init__(
        self,
        spec: dict[str, Any],
        data: bytes,
        name: str = "tokenizer.json",
        backends: Sequence[str] = BACKEND_NAMES,
        cache_bytes: int = BYTES_MAX,
    ) -> None:
        """`cache_bytes` bounds the cache of earlier texts; 0: no cache."""
        import tokenizers

        try:
            self._library = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # noqa: BLE001 - the library raises bare `Exception` for a file that it cannot read
            raise ConfigError(f"{name}: {error}") from None
        self._library.no_truncation()
        self._library.no_padding()
        self.tokens_max = TOKENS_MAX
        """Maximum tokens of a text; for more, the list alone would block all other threads."""
        self.vocab_size: int = self._vocab_size()
        """One more than the largest id."""
        self.special_ids = frozenset(
            token_id for token_id, token in self._library.get_added_tokens_decoder().items() if token.special
        )
        self._bytes_of, self.decoding = _decoder(spec.get("decoder"), name)
        self._tables: dict[bool, TokenTable] = {}
        self._token_bytes: list[bytes] | None = None
        self._text_json: list[bytes | None] | None = None
        self._byte_ids = _byte_token_ids(self._library) if self.decoding is Decoding.BYTE_FALLBACK else frozenset()
        self._affixes = self._find_affixes()
        self._encoder: Encoder | None = None
        self.backend = DEFINITION
        """Name of the backend, among `BACKENDS`, that encodes most text."""
        for backend in backends:
            if self._encoder is None and (encoder := self._proved(backend, spec, data, name)) is not None:
                self._encoder, self.backend = encoder, backend
        self._prefixes = self._proved_prefixes(spec, cache_bytes, name)

    @classmethod
    def from_dir(cls, path: str, backends: Sequence[str] = BACKEND_NAMES) -> "Tokenizer":
        """Load the tokenizer of a model directory. Raise `ConfigError`."""
        return cls.from_files(ModelFiles.from_dir(path), backends)

    @classmethod
    def from_files(cls, files: ModelFiles, backends: Sequence[str] = BACKEND_NAMES) -> "Tokenizer":
        """Load the tokenizer of a model. Raise `ConfigError` that names the file."""
        if is_tiktoken(files.tokenizer):
            data = tokenizer_json(files)
            spec: dict[str, Any] = msgspec.json.decode(data)
        else:
            data = read_bytes(files.tokenizer)
            spec = spec_of(data, files.tokenizer)
        return cls(spec, data, files.tokenizer, backends, cache_bytes_wanted())

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text; `add_special_tokens` adds the tokens expected around a bare prompt (often BOS).

        Raise `TooManyTokens` for a text of more than `tokens_max`.
        """
        if not add_special_tokens:
            return self._encode(text)
        if self._affixes is None:
            return self.encode_by_library(text, add_special_tokens)
        before, after = self._affixes
        return [*before, *self._encode(text), *after]

    def affixes(self) -> tuple[list[int], list[int]]:
        """Return the ids that the model expects before and after a bare prompt, such as BOS; none if they vary."""
        return self._affixes or ([], [])

    def _encode(self, text: str) -> list[int]:
        return self._encode_anew(text) if self._prefixes is None else self._prefixes.encode(text, self.tokens_max)

    def _encode_anew(self, text: str) -> list[int]:
        """Return the ids of a text, without the cache of stretches."""
        encoder = self._encoder
        if encoder is None or (len(text) > LONG_CHARS and not encoder.frees_the_interpreter):
            return self.encode_by_library(text)
        ids = encoder.encode(text, self.tokens_max)
        if isinstance(ids, int):
            raise TooManyTokens(ids, self.tokens_max)
        return self.encode_by_library(text) if ids is None else ids

    def encode_by_library(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode with the reference that `encode` must agree with. A long text does not block other threads."""
        if len(text) > LONG_CHARS:
            encoding = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        else:
            encoding = self._library.encode(text, add_special_tokens=add_special_tokens)
        if len(encoding) > self.tokens_max:
            raise TooManyTokens(len(encoding), self.tokens_max)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence."""
        text: str = self._library.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token in the vocabulary's spelling."""
        token_id: int | None = self._library.token_to_id(token)
        return token_id

    def markers(self) -> dict[str, int]:
        """Return the added tokens, such as `<|im_end|>` or `<think>`, with their ids."""
        added = self._library.get_added_tokens_decoder().items()
        return {token.content: token_id for token_id, token in added if token.special or token.content.strip()}

    def token_bytes(self) -> list[bytes]:
        """Id to the bytes it represents in the middle of a text; empty for an unused id."""
        if self._token_bytes is None:
            table = [b""] * self.vocab_size
            for token, token_id in self._library.get_vocab(with_added_tokens=True).items():
                table[token_id] = self._bytes_of(token)
            self._token_bytes = table
        return self._token_bytes

    def table(self, skip_special_tokens: bool = True) -> TokenTable:
        """Return the detokenizer's table. The first call takes about a microsecond per token of the vocabulary."""
        table = self._tables.get(skip_special_tokens)
        if table is None:
            raw = self.token_bytes()
            if self._text_json is None:
                self._text_json = text_json_of(raw)
            skipped = self.special_ids if skip_special_tokens else frozenset()
            table = TokenTable(raw, self._text_json, skipped, self._byte_ids)
            self._tables[skip_special_tokens] = table
        return table

    @property
    def is_fast(self) -> bool:
        """Whether most text is encoded by a faster encoder than the library."""
        return self._encoder is not None

    @property
    def cache_entries(self) -> int:
        """Number of cached words and stretches of text."""
        return sum(one.cache_entries for one in (self._encoder, self._prefixes) if one is not None)

    @property
    def cache_bytes(self) -> int:
        """Approximate memory of the cache."""
        return sum(one.cache_bytes for one in (self._encoder, self._prefixes) if one is not None)

    @property
    def cache_hits(self) -> int:
        """Number of cache hits."""
        return sum(one.cache_hits for one in (self._encoder, self._prefixes) if one is not None)

    @property
    def cache_misses(self) -> int:
        """Number of cache misses."""
        return sum(one.cache_misses for one in (self._encoder, self._prefixes) if one is not None)

    def _vocab_size(self) -> int:
        return 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)

    def _find_affixes(self) -> tuple[list[int], list[int]] | None:
        """Return the ids that the post-processor adds before and after a text, None if it does anything else."""
        bare, whole = self.encode_by_library("a"), self.encode_by_library("a", add_special_tokens=True)
        for start in range(len(whole) - len(bare) + 1):
            end = start + len(bare)
            if whole[start:end] == bare:
                before, after = whole[:start], whole[end:]
                other = self.encode_by_library("b c", add_special_tokens=True)
                return (before, after) if other == [*before, *self.encode_by_library("b c"), *after] else None
        return None

    def _proved(self, backend: str, spec: dict[str, Any], data: bytes, name: str) -> Encoder | None:
        """Return an encoder that agrees with the library on every text of the self-test."""
        encoder = BACKENDS[backend](spec, data, self._library.model)
        if isinstance(encoder, str):
            logger.info("%s: %s is not used: %s", name, backend, encoder)
            return None
        for text in self_test_texts([token["content"] for token in spec.get("added_tokens") or []]):
            ids = encoder.encode(text, self.tokens_max)
            if ids is not None and ids != self.encode_by_library(text):
                logger.warning("%s: %s is not used: its result differs from tokenizers for %r", name, backend, text)
                return None
        return encoder

    def _proved_prefixes(self, spec: dict[str, Any], cache_bytes: int, name: str) -> PrefixTokens | None:
        """Return the cache of earlier texts if texts may be cut at their special tokens."""
        cuts = cuts_of(spec.get("added_tokens") or ())
        if not cuts or not cache_bytes:
            return None
        trial = PrefixTokens(self._encode_anew, cuts, cache_bytes)
        for text in self_test_texts(cuts) * 2:  # Uncached, then cached.
            if trial.encode(text) != self.encode_by_library(text):
                logger.warning("%s: prefix cache disabled: cutting at special tokens changes the ids of %r", name, text)
                return None
        return PrefixTokens(self._encode_anew, cuts, cache_bytes)


def spec_of(data: bytes, name: str) -> dict[str, Any]:
    """Return a `tokenizer.json` without its model: vocabulary and merges take many times their size. Raise `ConfigError`."""
    try:
        parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        return {key: msgspec.json.decode(raw) for key, raw in parts.items() if key != MODEL}
    except UNREADABLE as error:
        raise ConfigError(f"{name}: not a JSON object ({error})") from None


def with_model(spec: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Return a parsed `tokenizer.json` with its model."""
    if MODEL in spec:
        return spec
    return {**spec, MODEL: msgspec.json.decode(msgspec.json.decode(data, type=dict[str, msgspec.Raw])[MODEL])}


def cache_bytes_wanted() -> int:
    """Return the size of the cache of earlier texts in bytes: `DYN_TOKENIZER_CACHE`, `DYN_TOKENIZER_CACHE_BYTES`."""
    if setting("DYN_TOKENIZER_CACHE", "1", str) == "0":
        return 0
    return max(0, setting("DYN_TOKENIZER_CACHE_BYTES", BYTES_MAX, int))


def self_test_texts(added_tokens: Sequence[str]) -> list[str]:
    """Return difficult texts: code, white space, digits, contractions, controls, scripts, added tokens."""
    random_ = random.Random(SELF_TEST_SEED)
    pieces = [
        *"aZ09 \t\n\r\x0b\x0c\x00\x1c\x7f'\"_-.,;:!?(){}[]<>|/\\@#$%^&*+=~`",
        *("  ", "   ", "\n\n", "\r\n", " \n ", "'s", "'LL", "'re", "don't", "I'VE", "12345", " 007", "3.14159"),
        *(" the", "Hello", " world", "camelCase", "snake_case", "def f(x):\n    return x", "!!!", "...", " ==", "://"),
        *(
            "é",
            "ß",
            "ñ",
            "Ж",
            " привет",
            "你好",
            "日本語",
            "한국어",
            "ا",
            "—",
            "“",
            "”",
            "…",
            "\u00a0",
            "\u3000",
            "½",
            "²",
            "😀",
            "€",
        ),
        *added_tokens[:8],
    ]
    texts = ["".join(random_.choices(pieces, k=random_.randint(1, 60))) for _ in range(SELF_TEST_TEXTS)]
    ascii_texts = ["".join(map(chr, random_.choices(range(128), k=200))) for _ in range(SELF_TEST_TEXTS // 6)]
    return ["", " ", *texts, *ascii_texts]


# ---- id -> bytes ----------------------------------------------------------------------------------------------------


def _decoder(decoder: dict[str, Any] | None, name: str) -> tuple[Callable[[str], bytes], Decoding]:
    """Return the conversion of a token's spelling to bytes. Raise `ConfigError` for an unsupported decoder."""
    kinds = _kinds(decoder)
    if kinds == ["ByteLevel"]:
        return _ByteLevel(), Decoding.BYTE_LEVEL
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return _sentencepiece_bytes, Decoding.BYTE_FALLBACK
    if kinds == ["Metaspace"]:
        return _metaspace_bytes, Decoding.PLAIN
    raise ConfigError(f"{name}: decoder {' + '.join(kinds) or 'null'} is not supported")


def _kinds(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [kind for part in decoder.get("decoders", []) for kind in _kinds(part)]
    return [str(decoder["type"])]


class _ByteLevel:
    """GPT-2's alphabet to bytes; a token with any other character is encoded as UTF-8."""

    def __init__(self) -> None:
        alphabet = {ord(char): chr(byte) for char, byte in byte_of_char().items()}
        self._latin = dict.fromkeys(range(256), NOT_LATIN) | alphabet

    def __call__(self, token: str) -> bytes:
        try:
            return token.translate(self._latin).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _byte_token(token)
    return bytes([byte]) if byte is not None else _metaspace_bytes(token)


def _metaspace_bytes(token: str) -> bytes:
    return token.replace(META_SPACE, " ").encode()


def _byte_token(token: str) -> int | None:
    """Return the byte of a fallback token such as `<0x0A>`, None for any other token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def _byte_token_ids(library: Any) -> frozenset[int]:
    vocab: dict[str, int] = library.get_vocab(with_added_tokens=True)
    return frozenset(token_id for token, token_id in vocab.items() if _byte_token(token) is not None)
