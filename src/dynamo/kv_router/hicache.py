"""SharedPages: which pages of KV a cache that all workers read has: SGLang's HiCache in a Mooncake store.

    page      as many tokens as the engine's pages have; its name is SHA-256(name of the page before, its tokens)
    object    what is stored of a page by one rank: <prefix>_<name as hex><suffix>, keys and values apart
    held      a page of which every object is there

The store tells of every object that comes and goes, in numbered batches. Where a number is missing nothing is known any
more, and what is told from there on is all. Pure: which objects make up a page follows from what the workers' cards say.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from dynamo.core.errors import InvalidArgument
from dynamo.tokens.hashing import as_u32

RUNTIME_KEY = "sglang_hicache_mooncake"
"""Where a card's `runtime_data` has the layout."""
PAGES_MAX = 1_000_000
"""Beyond it the page that came first is forgotten."""
HEX_DIGITS = 64
DEFAULT_TENANT = "default"

Runs = tuple[tuple[int, int], ...]
"""Blocks that are held: first and behind the last, in order."""


class HicacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker's engine stores its pages."""

    backend: str = "mooncake"
    page_size: int
    tp_size: int = 1
    pp_size: int = 1
    is_mla_model: bool = False
    is_eagle: bool = False
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    extra_backend_tag: str | None = None
    key_prefix: str | None = None
    kv_events_endpoint: str | None = None
    """Where the store tells what comes and goes."""

    @property
    def prefix(self) -> str:
        """What stands before a page's name."""
        prefix = self.key_prefix or self.extra_backend_tag
        return f"{prefix}_" if prefix else ""

    def suffixes(self) -> list[str]:
        """What stands behind it, one for each object of a page."""
        stages = range(max(1, self.pp_size))
        if self.is_mla_model:
            return [f"_{stage}_k" for stage in stages] if self.pp_size > 1 else ["__k"]
        ranks = max(1, self.tp_size)
        if self.should_split_heads:
            ranks = max(ranks, self.tp_lcm_size or 1)
        names = [f"{rank}_{stage}" if self.pp_size > 1 else str(rank) for stage in stages for rank in range(ranks)]
        return [f"_{name}_{part}" for name in names for part in "kv"]


class ObjectEvent(msgspec.Struct):
    """What the store tells of one object."""

    event_type: str
    object_key: str | None = None
    tenant_id: str = ""
    group_id: str | None = None


def read_layout(given: object) -> HicacheLayout:
    """What a card says. Raises `InvalidArgument`."""
    try:
        layout = msgspec.convert(given, HicacheLayout)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{RUNTIME_KEY}: {error}") from None
    if layout.page_size < 1 or not 1 <= len(layout.suffixes()) <= 1 << 16:
        raise InvalidArgument(
            f"{RUNTIME_KEY}: pages of {layout.page_size} tokens, {len(layout.suffixes())} objects each"
        )
    return layout


def page_names(tokens: Sequence[int], page_size: int, *, is_eagle: bool = False) -> list[bytes]:
    """The name of each complete page of a prompt. With `is_eagle` a token stands with the one behind it."""
    width = page_size * 4
    if is_eagle:
        pairs = array("I", [0]) * (2 * max(0, len(tokens) - 1))
        pairs[::2], pairs[1::2] = array("I", tokens[:-1]), array("I", tokens[1:])
        data, width = as_u32(pairs), 2 * width
    else:
        data = as_u32(tokens)
    sha256, name, names = hashlib.sha256, b"", []
    for at in range(0, len(data) - width + 1, width):
        name = sha256(name + data[at : at + width]).digest()
        names.append(name)
    return names


class SharedPages:
    """The pages that are held, as far as the store told."""

    def __init__(self, pages_max: int = PAGES_MAX) -> None:
        self._layout: HicacheLayout | None = None
        self._pages_max = pages_max
        self._pages: dict[bytes, int] = {}
        """By name, the objects that are there, as bits; the page that came first is the first."""
        self._bits: dict[str, int] = {}
        """By suffix."""
        self._whole = 0
        self._last: int | None = None
        """The last batch's number."""

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def layout(self) -> HicacheLayout | None:
        """How pages are stored; None while nobody said."""
        return self._layout

    def lay_out(self, layout: HicacheLayout | None) -> None:
        """Pages are stored in this way. What was known of another one is forgotten."""
        if layout == self._layout:
            return
        self._layout = layout
        self.clear()
        suffixes = layout.suffixes() if layout is not None else []
        self._bits = {suffix: 1 << place for place, suffix in enumerate(suffixes)}
        self._whole = (1 << len(suffixes)) - 1

    def clear(self) -> None:
        """Nothing is known any more."""
        self._pages.clear()
        self._last = None

    def apply(self, number: int, events: Iterable[ObjectEvent]) -> bool:
        """One batch. False where some before it were missed, so that all before them is forgotten."""
        if number == self._last:
            return True
        is_next = self._last is None or number == self._last + 1
        if not is_next:
            self._pages.clear()
        self._last = number
        for event in events:
            if event.object_key is not None and event.tenant_id in ("", DEFAULT_TENANT):
                self._note(event.event_type, event.object_key)
        return is_next

    def _note(self, kind: str, key: str) -> None:
        layout = self._layout
        if layout is None or not key.startswith(layout.prefix):
            return
        at = len(layout.prefix)
        bit = self._bits.get(key[at + HEX_DIGITS :])
        if bit is None:
            return
        try:
            name = bytes.fromhex(key[at : at + HEX_DIGITS])
        except ValueError:
            return
        before = self._pages.get(name, 0)
        if kind == "stored":
            self._pages[name] = before | bit
            if len(self._pages) > self._pages_max:
                del self._pages[next(iter(self._pages))]
        elif kind == "removed" and before:
            if before & ~bit:
                self._pages[name] = before & ~bit
            else:
                del self._pages[name]

    def find(self, tokens: Sequence[int]) -> Runs:
        """Which blocks of a prompt are held; a block is a page."""
        layout = self._layout
        if layout is None or not self._pages:
            return ()
        whole, pages = self._whole, self._pages
        found: list[tuple[int, int]] = []
        begin: int | None = None
        names = page_names(tokens, layout.page_size, is_eagle=layout.is_eagle)
        for place, name in enumerate(names):
            if pages.get(name) == whole:
                begin = place if begin is None else begin
            elif begin is not None:
                found.append((begin, place))
                begin = None
        if begin is not None:
            found.append((begin, len(names)))
        return tuple(found)


def held_from(runs: Runs, depth: int) -> int:
    """How many blocks in a row are held from there on: one behind a hole is of no use, as a prompt is read from its start."""
    for begin, end in runs:
        if end > depth:
            return end - depth if begin <= depth else 0
    return 0
