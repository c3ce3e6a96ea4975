"""Metrics: counters, gauges and histograms with low overhead per token, and their Prometheus text.

A family has a name and label names; `labels(model="m")` returns a child that the caller keeps. Children are plain
Python without locks: only the event loop's thread may use them.

    ttft = registry.histogram("dynamo_frontend_time_to_first_token_seconds", "…", ["model"], buckets)
    child = ttft.labels(model="demo")     # once
    child.observe(0.012)                  # often
"""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

DEFAULT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

SERIES_MAX = 10_000  # Children of one family; beyond it a label value is unbounded input and would fill the memory.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Counter:
    """A number that only increases, or that a callback returns."""

    __slots__ = ("_callback", "value")

    def __init__(self) -> None:
        self.value: float = 0
        self._callback: Callable[[], float] | None = None

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def follow(self, callback: Callable[[], float]) -> None:
        """Read the value from `callback` whenever the metrics are rendered."""
        self._callback = callback

    def samples(self, name: str, labels: str) -> Iterator[str]:
        if self._callback is not None:
            self.value = self._callback()
        yield f"{name}{_braced(labels)} {format_number(self.value)}"


class Gauge:
    """A number that increases and decreases, or the sum of what callbacks return."""

    __slots__ = ("_callbacks", "value")

    def __init__(self) -> None:
        self.value: float = 0
        self._callbacks: tuple[Callable[[], float], ...] = ()

    def set(self, value: float) -> None:
        self.value = value

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def dec(self, amount: float = 1) -> None:
        self.value -= amount

    def follow(self, callback: Callable[[], float]) -> None:
        """Read the value from `callback` whenever the metrics are rendered."""
        self._callbacks = (callback,)

    def add_source(self, callback: Callable[[], float]) -> None:
        """Add the value of `callback` to those of the earlier ones whenever the metrics are rendered."""
        self._callbacks = (*self._callbacks, callback)

    def remove_source(self, callback: Callable[[], float]) -> bool:
        """Remove a callback of `add_source`. Return whether others are left."""
        self._callbacks = tuple(one for one in self._callbacks if one is not callback)
        return bool(self._callbacks)

    def samples(self, name: str, labels: str) -> Iterator[str]:
        if self._callbacks:
            self.value = sum(callback() for callback in self._callbacks)
        yield f"{name}{_braced(labels)} {format_number(self.value)}"


class Histogram:
    """Number of observations per bucket; a value equal to a bound belongs to that bucket."""

    __slots__ = ("_callbacks", "bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self._callbacks: tuple[Callable[[], None], ...] = ()

    def add_source(self, callback: Callable[[], None]) -> None:
        """Call `callback`, which records what is not recorded yet, whenever the metrics are rendered."""
        self._callbacks = (*self._callbacks, callback)

    def remove_source(self, callback: Callable[[], None]) -> None:
        """Remove a callback of `add_source`."""
        self._callbacks = tuple(one for one in self._callbacks if one != callback)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_many(self, value: float, count: int) -> None:
        """Record the same value `count` times at the cost of one observation."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        return sum(self.counts)

    def samples(self, name: str, labels: str) -> Iterator[str]:
        for callback in self._callbacks:
            callback()
        prefix = f"{labels}," if labels else ""
        total = 0
        for bound, count in zip([*self.bounds, math.inf], self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{{prefix}le="{format_number(bound)}"}} {total}'
        yield f"{name}_sum{_braced(labels)} {format_number(self.sum)}"
        yield f"{name}_count{_braced(labels)} {total}"


Child = TypeVar("Child", Counter, Gauge, Histogram)


class Family(Generic[Child]):
    """All series of one metric name."""

    def __init__(self, kind: str, name: str, help: str, label_names: Sequence[str], make: Callable[[], Child]) -> None:
        self.kind = kind
        self.name = name
        self.help = help
        self.label_names = tuple(label_names)
        self._make: Callable[[], Child] = make
        self._children: dict[tuple[str, ...], Child] = {}
        self._more: dict[tuple[str, ...], str] = {}
        """Additional labels of the children that have any, in text format."""
        self._texts: dict[tuple[str, ...], str] = {}
        """Labels in text format of the children that were rendered."""
        if not self.label_names:
            self.labels()

    def labels(self, **values: str) -> Child:
        """Return the child with these label values; the same one each time. Raises `ValueError` for a wrong label."""
        return self._child(self._key(values))

    def labels_and(self, more: Sequence[tuple[str, str]], **values: str) -> Child:
        """Return `labels` with additional labels of this child only. Raises `ValueError` for a label in use."""
        for name, _ in more:
            if name in self.label_names or not _LABEL.fullmatch(name):
                raise ValueError(f"{self.name}: {name!r} cannot be an additional label")
        key = (*self._key(values), *(word for pair in more for word in pair))
        if more:
            self._more[key] = "".join(f',{name}="{escape(value)}"' for name, value in more)
        return self._child(key)

    def _key(self, values: Mapping[str, str]) -> tuple[str, ...]:
        try:
            key = tuple([str(values[name]) for name in self.label_names])
        except KeyError as error:
            raise ValueError(f"{self.name}: label {error} is missing") from None
        if len(values) != len(key):
            raise ValueError(f"{self.name}: has labels {self.label_names}, got {tuple(values)}")
        return key

    def _child(self, key: tuple[str, ...]) -> Child:
        child = self._children.get(key)
        if child is None:
            if len(self._children) >= SERIES_MAX:
                return self._make()
            child = self._children[key] = self._make()
        return child

    def remove(self, **values: str) -> None:
        """Remove every child whose labels have these values; without any, remove all children."""
        index = {name: i for i, name in enumerate(self.label_names)}
        gone = [key for key in self._children if all(key[index[n]] == v for n, v in values.items())]
        for key in gone:
            del self._children[key]
            self._more.pop(key, None)
            self._texts.pop(key, None)

    def pieces(self) -> Iterator[str]:
        """Yield the family's text: its head, then the lines of one child at a time. Children may change in between."""
        if not self._children:
            return
        help_text = self.help.replace("\\", "\\\\").replace("\n", "\\n")
        yield f"# HELP {self.name} {help_text}\n# TYPE {self.name} {self.kind}\n"
        for key, child in list(self._children.items()):
            if key in self._children:
                yield "".join(f"{line}\n" for line in child.samples(self.name, self._labels_text(key)))

    def _labels_text(self, key: tuple[str, ...]) -> str:
        """Return the labels of a child in text format."""
        text = self._texts.get(key)
        if text is None:
            own = ",".join([f'{name}="{escape(value)}"' for name, value in zip(self.label_names, key, strict=False)])
            text = self._texts[key] = (own + self._more.get(key, "")).removeprefix(",")
        return text


class MetricsRegistry:
    """All metric families of one process, and their text for a scraper.

    Declaring an existing family again returns it; declaring it with a different type or labels raises `ValueError`.
    """

    def __init__(self) -> None:
        self._families: dict[str, Family[Any]] = {}
        self._texts: list[Callable[[], str]] = []

    def counter(self, name: str, help: str, labels: Iterable[str] = ()) -> Family[Counter]:
        return self._add(Family("counter", name, help, tuple(labels), Counter))

    def gauge(self, name: str, help: str, labels: Iterable[str] = ()) -> Family[Gauge]:
        return self._add(Family("gauge", name, help, tuple(labels), Gauge))

    def histogram(
        self, name: str, help: str, labels: Iterable[str] = (), buckets: Sequence[float] = DEFAULT_BUCKETS
    ) -> Family[Histogram]:
        bounds = tuple(buckets)
        if list(bounds) != sorted(set(bounds)):
            raise ValueError(f"{name}: buckets must grow, got {bounds}")
        return self._add(Family("histogram", name, help, tuple(labels), lambda: Histogram(bounds)))

    def add_text(self, callback: Callable[[], str]) -> None:
        """Append exposition text from another source, such as an engine's own metrics; any thread may call `callback`."""
        self._texts.append(callback)

    @property
    def families(self) -> list[Family[Any]]:
        """The declared families."""
        return list(self._families.values())

    def render(self) -> str:
        """Return the Prometheus text exposition, format 0.0.4."""
        return "".join(self.pieces())

    def pieces(self) -> Iterator[str]:
        """Yield that text in pieces: the lines of one child, or the text of another source, at a time."""
        yield from self.own_pieces()
        for callback in self.texts:
            yield whole_lines(callback())

    def own_pieces(self) -> Iterator[str]:
        """Yield the text of the declared families in pieces: the lines of one child at a time."""
        for family in list(self._families.values()):
            yield from family.pieces()

    @property
    def texts(self) -> list[Callable[[], str]]:
        """The callbacks of the other sources."""
        return list(self._texts)

    def _add(self, family: Family[Child]) -> Family[Child]:
        known = self._families.setdefault(family.name, family)
        if known.kind != family.kind or known.label_names != family.label_names:
            raise ValueError(f"{family.name} is already a {known.kind} with labels {known.label_names}")
        return known


def whole_lines(text: str) -> str:
    """Return the text with a line break at its end, unless it is empty."""
    return text if text.endswith("\n") or not text else text + "\n"


def log_buckets(low: float, high: float, count: int) -> tuple[float, ...]:
    """Return 0 and `count` - 1 logarithmically spaced values from `low` to `high`, to two significant digits."""
    if not (0 < low < high and count >= 3):
        raise ValueError(f"buckets need 0 < min < max and count >= 3, got {low}, {high}, {count}")
    ratio = math.log(high / low) / (count - 2)
    values = [float(f"{low * math.exp(ratio * step):.1e}") for step in range(count - 1)]
    return (0.0, *sorted(set(values)))


def spread_buckets(low: float, high: float, count: int) -> tuple[float, ...]:
    """Return 0 and `count` - 1 powers from `low` (excluded) to `high`, each rounded to two digits."""
    if not (0 < low < high and count >= 2):
        raise ValueError(f"buckets need 0 < min < max and count >= 2, got {low}, {high}, {count}")
    ratio = math.log(high / low) / (count - 1)
    values = {float(f"{low * math.exp(ratio * step):.1e}") for step in range(1, count)}
    return (0.0, *sorted(values))


def escape(value: str) -> str:
    """Escape a label value for the text format."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def format_number(value: float) -> str:
    """Format whole numbers without a fraction, others as Python does."""
    if value == math.inf:
        return "+Inf"
    if value == -math.inf:
        return "-Inf"
    if value != value:  # noqa: PLR0124 - the definition of NaN
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _braced(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""
