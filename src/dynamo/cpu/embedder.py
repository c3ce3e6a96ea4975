"""Embedder: one vector per text, several texts per step. No threads, so tests can drive it.

A step computes as many whole texts as fit into its rows, or a chunk of a longer text. Computed keys and values are not
reused: every step starts at the first slot again, unless it continues a longer text.
"""

import enum
import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dynamo.core.errors import ConfigError
from dynamo.cpu.attention import F32
from dynamo.cpu.model import Batch, TransformerModel
from dynamo.cpu.spans import TokenSpan

POOLING_FILE = os.path.join("1_Pooling", "config.json")
"""File in which sentence-transformers configures the pooling of a model."""


class Pooling(enum.Enum):
    """Pooling of a text's token states into a vector."""

    MEAN = "mean"
    LAST = "last"
    CLS = "cls"


POOLING_KEYS = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_cls_token": Pooling.CLS,
}


def read_pooling(path: str, wanted: str) -> Pooling:
    """Return the requested pooling; for `auto` the model's setting, or last token. Raise `ConfigError`."""
    if wanted != "auto":
        return Pooling(wanted)
    file = os.path.join(path, POOLING_FILE)
    if not os.path.exists(file):
        return Pooling.LAST
    try:
        with open(file, encoding="utf-8") as opened:
            settings = json.load(opened)
        modes = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True]
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: {error}") from None
    if len(modes) != 1 or modes[0] not in POOLING_KEYS:
        raise ConfigError(
            f"{file}: pooling mode {', '.join(modes) or 'none'}; must be exactly one of {', '.join(POOLING_KEYS)}"
        )
    return POOLING_KEYS[modes[0]]


@dataclass(slots=True, eq=False)
class Job:
    """Tokenized texts of one request and their vectors."""

    texts: Sequence[Sequence[int]]
    dimensions: int | None = None
    """Number of leading components to return; None for all."""
    vectors: list[F32 | None] = field(default_factory=list)
    is_open: bool = True
    is_activated: bool = True
    """Whether a classifier returns probabilities instead of raw scores."""
    begun: int = 0
    """Number of texts whose computation has started."""
    left: int = 0
    """Number of texts without a vector."""

    def __post_init__(self) -> None:
        self.vectors = [None] * len(self.texts)
        self.left = len(self.texts)


@dataclass(slots=True)
class _Long:
    """Text that takes several steps."""

    job: Job
    place: int
    computed: int = 0
    pooled: F32 | None = None


class Embedder:
    """The model and its queue of jobs."""

    def __init__(
        self, model: TransformerModel, pooling: Pooling, rows_max: int, finish: Callable[[F32], F32] | None = None
    ) -> None:
        """`finish` turns a pooled state into a vector (default: `unit`). The model needs a slot for every token of its longest
        text and for every row of a step.
        """
        self._model = model
        self._pooling = pooling
        self._rows_max = rows_max
        self._finished = finish or unit
        self._jobs: deque[Job] = deque()
        self._long: _Long | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._jobs) or self._long is not None

    def add(self, job: Job) -> None:
        """Add a job. Every text must have at least one token and at most the model's maximum."""
        self._jobs.append(job)

    def step(self) -> list[Job]:
        """Compute one step; return the completed jobs."""
        if self._long is None:
            taken = self._take()
            if self._long is None:
                return self._pack(taken) if taken else []
        return self._continue(self._long)

    def _take(self) -> list[tuple[Job, int]]:
        """Take the next texts that fit together, one job at a time in turn; a longer text is taken alone."""
        taken: list[tuple[Job, int]] = []
        rows_left = self._rows_max
        while self._jobs:
            job = self._jobs[0]
            if not job.is_open:
                self._jobs.popleft()
                continue
            size = len(job.texts[job.begun])
            if size > rows_left and taken:
                break
            self._jobs.popleft()
            place, job.begun = job.begun, job.begun + 1
            if job.begun < len(job.texts):
                self._jobs.append(job)
            if size > self._rows_max:
                self._long = _Long(job, place)
                break
            taken.append((job, place))
            rows_left -= size
        return taken

    def _pack(self, taken: list[tuple[Job, int]]) -> list[Job]:
        taken.sort(key=lambda one: len(one[0].texts[one[1]]) > 1)  # Spans of one row come first.
        texts = [job.texts[place] for job, place in taken]
        ends = np.cumsum([len(text) for text in texts])
        spans = [
            TokenSpan(int(end) - len(text), len(text), len(text), [(int(end) - len(text), int(end))])
            for text, end in zip(texts, ends, strict=True)
        ]
        slots = np.arange(int(ends[-1]), dtype=np.intp)
        positions = np.concatenate([np.arange(len(text), dtype=np.intp) for text in texts])
        tokens = np.fromiter((token for text in texts for token in text), np.intp, len(slots))
        if self._pooling is Pooling.MEAN:
            states = self._model.states(Batch(tokens, positions, slots, spans, slots))
            starts = np.array([span.row for span in spans], dtype=np.intp)
            pooled = np.add.reduceat(states, starts, axis=0)
        else:
            rows = [span.row + (span.count - 1 if self._pooling is Pooling.LAST else 0) for span in spans]
            pooled = self._model.states(Batch(tokens, positions, slots, spans, np.array(rows, dtype=np.intp)))
        done = [self._finish(job, place, pooled[row]) for row, (job, place) in enumerate(taken)]
        return [job for job in done if job is not None]

    def _continue(self, long: _Long) -> list[Job]:
        """Compute the next chunk of a long text."""
        text, first = long.job.texts[long.place], long.computed
        if not long.job.is_open:
            self._long = None
            return []
        end = min(first + self._rows_max, len(text))
        count = end - first
        positions = np.arange(first, end, dtype=np.intp)
        rows = np.arange(count, dtype=np.intp)
        wanted = {Pooling.MEAN: rows, Pooling.LAST: rows[-1:], Pooling.CLS: rows[:1]}[self._pooling]
        tokens = np.fromiter(text[first:end], np.intp, count)
        states = self._model.states(Batch(tokens, positions, positions, [TokenSpan(0, count, end, [(0, end)])], wanted))
        if self._pooling is Pooling.MEAN and long.pooled is not None:
            long.pooled += states.sum(axis=0)
        elif self._pooling is Pooling.MEAN:
            long.pooled = states.sum(axis=0)
        elif self._pooling is Pooling.LAST or first == 0:
            long.pooled = states[0].copy()
        long.computed = end
        if end < len(text):
            return []
        self._long = None
        assert long.pooled is not None, "a text has at least one token"
        done = self._finish(long.job, long.place, long.pooled)
        return [] if done is None else [done]

    def _finish(self, job: Job, place: int, pooled: F32) -> Job | None:
        """Store a vector; return the job if it was the last one."""
        job.vectors[place] = self._finished(pooled[: job.dimensions])
        job.left -= 1
        return job if job.left == 0 and job.is_open else None


def unit(vector: F32) -> F32:
    """Return the vector scaled to length 1; this makes the sum of states equivalent to their mean."""
    length = max(float(np.dot(vector, vector)) ** 0.5, 1e-12)
    direction: F32 = (vector / np.float32(length)).astype(np.float32)
    return direction
