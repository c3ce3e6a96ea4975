"""Synthetic: generated sessions with shared prefixes, growing turns and random arrivals."""

import random
from dataclasses import dataclass

from dynamo.core.errors import ConfigError
from dynamo.replay.load import ReplaySession, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Parameters of the generated sessions."""

    input_tokens: int
    """Prompt tokens of the first turn; each further turn adds the previous answer and this number of tokens."""
    output_tokens: int
    requests: int
    turns: int = 1
    shared_prefix_ratio: float = 0.0
    """Share of the first prompt that is common to its group."""
    prefix_groups: int = 0
    inter_turn_delay_ms: float = 0.0
    arrival_interval_ms: float | None = None
    """Constant interval; `request_rate` gives random (Poisson) arrivals instead."""
    request_rate: float | None = None
    block_tokens: int = 512
    seed: int = 42

    def __post_init__(self) -> None:
        for flag, value in (
            ("--input-tokens", self.input_tokens),
            ("--output-tokens", self.output_tokens),
            ("--request-count", self.requests),
            ("--turns-per-session", self.turns),
        ):
            if value < 1:
                raise ConfigError(f"{flag} {value}: expected 1 or more")
        if not 0.0 <= self.shared_prefix_ratio <= 1.0:
            raise ConfigError(f"--shared-prefix-ratio {self.shared_prefix_ratio:g}: expected a number from 0 to 1")
        if self.prefix_groups < 0 or self.inter_turn_delay_ms < 0:
            raise ConfigError("--num-prefix-groups and --inter-turn-delay-ms must be zero or more")
        if self.request_rate is not None and self.request_rate <= 0:
            raise ConfigError(f"--request-rate {self.request_rate:g}: expected more than 0")


def sessions(shape: Shape) -> list[ReplaySession]:
    """Generate the sessions of a shape; equal seeds give equal sessions."""
    rng = random.Random(shape.seed)
    block = shape.block_tokens
    shared = int(shape.input_tokens * shape.shared_prefix_ratio) // block if shape.prefix_groups else 0
    fresh = shape.prefix_groups * shared
    found: list[ReplaySession] = []
    at_ms = 0.0
    for number in range(0, shape.requests, shape.turns):
        group = rng.randrange(shape.prefix_groups) if shared else 0
        ids = [group * shared + at for at in range(shared)]
        tokens = shape.input_tokens
        turns: list[Turn] = []
        for turn in range(min(shape.turns, shape.requests - number)):
            missing = -(-tokens // block) - len(ids)
            ids += range(fresh, fresh + missing)
            fresh += missing
            turns.append(
                Turn(
                    f"r{number + turn}",
                    tokens,
                    shape.output_tokens,
                    tuple(ids),
                    at_ms if turn == 0 else None,
                    shape.inter_turn_delay_ms if turn else 0.0,
                )
            )
            tokens += shape.output_tokens + shape.input_tokens
        found.append(ReplaySession(f"s{number // shape.turns}", turns))
        if shape.request_rate is not None:
            at_ms += rng.expovariate(shape.request_rate) * 1000
        elif shape.arrival_interval_ms is not None:
            at_ms += shape.arrival_interval_ms
    return found
