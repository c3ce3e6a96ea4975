"""HicachePages: pages of KV cache in a store shared by all workers (SGLang's HiCache in a Mooncake store).

    page      one page of the engine's cache; its name is SHA-256(name of the previous page, its tokens)
    object    one rank's part of a page: <prefix>_<name in hex><suffix>; keys and values are separate objects
    held      a page of which every object is stored

The store publishes each added and removed object in numbered batches. A missing number invalidates all previous knowledge;
only later events count from then on. The objects of a page follow from the layout in the workers' cards.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from dynamo.core.errors import InvalidArgument
from dynamo.tokens.hashing import as_u32

RUNTIME_KEY = "sglang_hicache_mooncake"
"""Key of the layout in a card's `runtime_data`."""
PAGES_MAX = 1_000_000
"""Bound on the number of pages; the oldest page is dropped."""
HEX_DIGITS = 64
DEFAULT_TENANT = "default"

Runs = tuple[tuple[int, int], ...]
"""Ranges of cached blocks: (first, one past the last), in order."""


class HicacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout in which a worker's engine stores its pages."""

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
    """Address at which the store publishes its events."""

    @property
    def prefix(self) -> str:
        """Return the prefix of object names."""
        prefix = self.key_prefix or self.extra_backend_tag
        return f"{prefix}_" if prefix else ""

    def suffixes(self) -> list[str]:
        """Return the suffixes of object names, one for each object of a page."""
        stages = range(max(1, self.pp_size))
        if self.is_mla_model:
            return [f"_{stage}_k" for stage in stages] if self.pp_size > 1 else ["__k"]
        ranks = max(1, self.tp_size)
        if self.should_split_heads:
            ranks = max(ranks, self.tp_lcm_size or 1)
        names = [f"{rank}_{stage}" if self.pp_size > 1 else str(rank) for stage in stages for rank in range(ranks)]
        return [f"_{name}_{part}" for name in names for part in "kv"]


class ObjectEvent(msgspec.Struct):
    """One event of the store about one object."""

    event_type: str
    object_key: str | None = None
    tenant_id: str = ""
    group_id: str | None = None


def read_layout(given: object) -> HicacheLayout:
    """Decode the layout in a card. Raises `InvalidArgument`."""
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
    """Return the name of each complete page of a prompt. With `is_eagle`, each token is paired with the next one."""
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


class HicachePages:
    """The pages in the shared store, according to its events."""

    def __init__(self, pages_max: int = PAGES_MAX) -> None:
        self._layout: HicacheLayout | None = None
        self._pages_max = pages_max
        self._pages: dict[bytes, int] = {}
        """Stored objects of each page as bits, by page name; oldest page first."""
        self._bits: dict[str, int] = {}
        """Bit of each object, by suffix."""
        self._whole = 0
        self._last: int | None = None
        """Number of the last batch."""

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def layout(self) -> HicacheLayout | None:
        """Return the layout of the pages; None until a worker has published one."""
        return self._layout

    def lay_out(self, layout: HicacheLayout | None) -> None:
        """Set the layout; pages known under a different layout are dropped."""
        if layout == self._layout:
            return
        self._layout = layout
        self.clear()
        suffixes = layout.suffixes() if layout is not None else []
        self._bits = {suffix: 1 << place for place, suffix in enumerate(suffixes)}
        self._whole = (1 << len(suffixes)) - 1

    def clear(self) -> None:
        """Drop all pages."""
        self._pages.clear()
        self._last = None

    def apply(self, number: int, events: Iterable[ObjectEvent]) -> bool:
        """Apply one batch. Return False if earlier batches were missed; all earlier pages are dropped then."""
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
        """Return the ranges of a prompt's blocks that are stored; a block is a page."""
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
    """Return the number of consecutive blocks from `depth`; blocks after a gap are useless, as a prompt is read in order."""
    for begin, end in runs:
        if end > depth:
            return end - depth if begin <= depth else 0
    return 0
