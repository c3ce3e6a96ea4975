"""Planning: `dynamo plan explain` and `dynamo plan replay` show and check the decisions of a planner's record."""

import shutil
import sys
import textwrap
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dynamo.cli.route import table
from dynamo.cli.verbs import run_verb
from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.planner.core.load_scaling import LoadProposal
from dynamo.planner.core.merge import MergeOutcome
from dynamo.planner.core.record import SCHEMA, Start, Tick
from dynamo.planner.core.record import replay as replayed
from dynamo.planner.core.throughput_scaling import ThroughputProposal
from dynamo.planner.plugins.types import ComponentTarget, PredictionData
from dynamo.protocols.planner import ScalingDecision

T = TypeVar("T")

HELP = """\
dynamo plan: decisions of a planner, from a record that it wrote (log_dir, or dynamo replay --planner-record)

  dynamo plan explain FILE            the last decisions: observations, predictions, proposals, limits and reasons
  dynamo plan replay FILE             decide every recorded tick again; exit status 1 if a decision differs

  FILE may be a directory: its newest record. --help after either command lists its options.
"""
RECORDS = "planner-ticks-*.jsonl"
WIDTH_MIN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanExplainConfig:
    """Show the last decisions of a planner's record, and why they were made."""

    file: str | None = option(None, "file", None, "Record of a planner, or a directory with records: the newest one")
    last: int = option(10, "--last", None, "Number of decisions to show, the newest last")
    json: bool = option(False, "--json", None, "Print the decisions as a JSON array")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReplayConfig:
    """Decide every tick of a planner's record again and compare the decisions."""

    file: str | None = option(None, "file", None, "Record of a planner, or a directory with records: the newest one")


class SavedResult(msgspec.Struct, kw_only=True):
    """Result of a plugin in a recorded stage."""

    plugin_id: str
    result: dict[str, Any] = {}

    @property
    def targets(self) -> list[ComponentTarget]:
        """Targets of an override; empty for any other result."""
        return msgspec.convert(self.result.get("targets", []), list[ComponentTarget])


class SavedStage(msgspec.Struct, kw_only=True):
    """A recorded stage."""

    stage: str
    results: list[SavedResult] = []
    held: list[str] = []
    failed: list[tuple[str, str]] = []
    skipped: list[tuple[str, str]] = []
    outcome: MergeOutcome | None = None


class SavedDecision(msgspec.Struct, kw_only=True):
    """The parts of a recorded decision that are shown."""

    now_s: float
    action: str
    scale_to: ScalingDecision | None
    load: LoadProposal
    throughput: ThroughputProposal
    predictions: PredictionData | None
    stages: list[SavedStage]
    lower_bounds: dict[str, int] = {}
    clamped: list[str] = []
    limits: list[str] = []
    rejected_by: str = ""
    reject_reason: str = ""


@dataclass(frozen=True, slots=True)
class ShownTick:
    """A tick of a record with its decision; `number` counts from 1 in the record."""

    number: int
    tick: Tick
    decision: SavedDecision


def plan(argv: Sequence[str]) -> int:
    """Run `dynamo plan`. Raise `ConfigError` for a file that is not a record, or a damaged one."""
    return run_verb("dynamo plan", HELP, {"explain": explain, "replay": replay}, argv)


def explain(argv: Sequence[str]) -> int:
    """Run `dynamo plan explain`."""
    config = load(PlanExplainConfig, argv, prog="dynamo plan explain")
    if config.last < 1:
        raise ConfigError(f"--last {config.last}: must be at least 1")
    path = record_path(config.file)
    shown = last_ticks(path, config.last)
    if config.json:
        print(msgspec.json.format(msgspec.json.encode([as_json(one) for one in shown]), indent=2).decode())
    elif not shown:
        print(f"{path}: no ticks yet.")
    else:
        print(explained(shown, max(WIDTH_MIN, shutil.get_terminal_size((100, 24)).columns)))
    return 0


def replay(argv: Sequence[str]) -> int:
    """Run `dynamo plan replay`. Return 1 at the first decision that differs from the recorded one."""
    path = record_path(load(PlanReplayConfig, argv, prog="dynamo plan replay").file)
    count = 0
    try:
        for tick, decision in replayed(record_lines(path)):
            count += 1
            if bytes(tick.decision) != decision:
                print(f"tick {count} ({tick.input.now_s:g} s): {difference(bytes(tick.decision), decision)}")
                return 1
    except ConfigError as error:
        raise ConfigError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    except (InvalidArgument, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: tick {count + 1}: {error}") from None
    print(f"{count} {'tick' if count == 1 else 'ticks'}, all decisions equal")
    return 0


# Reading


def record_path(argument: str | None) -> Path:
    """Return the file of an argument; for a directory, its newest record. Raise `ConfigError` if there is none."""
    if argument is None:
        raise ConfigError("FILE: missing; expected a planner's record or a directory with records")
    path = Path(argument)
    if not path.is_dir():
        return path
    found = max(path.glob(RECORDS), default=None, key=lambda one: one.name)  # Names begin with the time of the start.
    if found is None:
        raise ConfigError(f"{path}: no record ({RECORDS}) in this directory")
    return found


def record_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a record, whose first one is checked; an unfinished last line is left out with a note.

    Raises `ConfigError` for a file that cannot be read or is not a record.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    check_start(path, line)
                elif not line.endswith(b"\n") and not is_complete(line):
                    sys.stderr.write(f"note: {path}: line {number} is not complete and is left out\n")
                    return
                yield line
            if not file.tell():
                raise ConfigError(f"{path}: the file is empty; expected a planner's record")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror or error}") from None


def check_start(path: Path, line: bytes) -> None:
    """Raise `ConfigError` unless a line begins a record of this version."""
    expected = f"expected a planner's record (schema {SCHEMA})"
    try:
        head = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ConfigError(f"{path}: line 1 is not JSON; {expected}") from None
    schema = head.get("schema") if isinstance(head, dict) else None
    if schema != SCHEMA:
        found = "has no schema" if schema is None else f"has the schema {schema!r}"
        raise ConfigError(f"{path}: line 1 {found}; {expected}")
    decoded(path, line, Start, 1)


def is_complete(line: bytes) -> bool:
    """Return whether a line is JSON."""
    try:
        msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return True


def decoded(path: Path, text: bytes, kind: type[T], line: int) -> T:
    """Return a decoded part of a record. Raise `ConfigError` with its line if it is damaged."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: line {line} is damaged: {error}") from None


def last_ticks(path: Path, count: int) -> list[ShownTick]:
    """Return the last ticks of a record, the newest last."""
    kept = deque(enumerate(record_lines(path)), maxlen=count + 1)
    shown = []
    for number, line in list(kept)[-count:]:
        if number:
            tick = decoded(path, line, Tick, number + 1)
            shown.append(ShownTick(number, tick, decoded(path, bytes(tick.decision), SavedDecision, number + 1)))
    return shown


# Output


def as_json(one: ShownTick) -> dict[str, Any]:
    """Return a tick for `--json`: its observations without the single steps, and the whole decision."""
    seen = one.tick.input
    return {
        "tick": one.number,
        "scheduled": one.tick.scheduled,
        "worker_counts": seen.worker_counts,
        "traffic": seen.traffic,
        "decision": one.tick.decision,
    }


def explained(shown: Sequence[ShownTick], width: int) -> str:
    """Format ticks as a table; the lines below a row are its details, wrapped at the width."""
    columns = ("tick", "time s", "prefill", "decode", "requests", "input", "output", "action")
    head, *rows = table(columns, [row(one) for one in shown]).splitlines()
    lines = [head]
    for text, one in zip(rows, shown, strict=True):
        lines.append(text)
        for name, detail in details(one):
            indent = " " * 6
            lines += textwrap.wrap(
                f"{name}: {detail}",
                width,
                initial_indent=indent,
                subsequent_indent=indent + "  ",
                break_on_hyphens=False,
            )
    return "\n".join([*lines, "", "prefill, decode: ready/expected workers; input, output: mean tokens of a request"])


def row(one: ShownTick) -> tuple[str, ...]:
    """Return the cells of a tick."""
    counts, traffic = one.tick.input.worker_counts, one.tick.input.traffic
    workers = ("?", "?")
    if counts is not None:
        workers = (
            ready(counts.ready_num_prefill, counts.expected_num_prefill),
            ready(counts.ready_num_decode, counts.expected_num_decode),
        )
    observed = ("-",) * 3
    if traffic is not None:
        observed = (f"{traffic.num_req:g}", f"{traffic.isl:.0f}", f"{traffic.osl:.0f}")
    return (str(one.number), f"{one.decision.now_s:.1f}", *workers, *observed, action(one.decision))


def ready(count: int | None, expected: int | None) -> str:
    """Return the ready and the expected workers of a role; a dash for a role without workers."""
    if count is None and expected is None:
        return "-"
    return f"{'?' if count is None else count}/{'?' if expected is None else expected}"


def action(decision: SavedDecision) -> str:
    """Return what a decision does."""
    target = decision.scale_to
    if target is None:
        return "no change"
    pairs = (("prefill", target.num_prefill), ("decode", target.num_decode))
    return ", ".join(f"{role}={count}" for role, count in pairs if count is not None)


def details(one: ShownTick) -> Iterator[tuple[str, str]]:
    """Yield the named details of a tick: traffic, prediction, each stage, clamps and reasons."""
    decision, traffic = one.decision, one.tick.input.traffic
    if traffic is not None:
        known = [("KV hit rate", traffic.kv_hit_rate), ("accept length", traffic.accept_length)]
        yield (
            "traffic",
            ", ".join([f"in {traffic.duration_s:g} s", *(f"{n} {v:.3g}" for n, v in known if v is not None)]),
        )
    if decision.predictions is not None:
        found = msgspec.to_builtins(decision.predictions)
        source = found.pop("source", "")
        values = ", ".join(
            f"{name.removeprefix('predicted_')} {value:.6g}" for name, value in found.items() if value is not None
        )
        yield "predicted", f"{values or 'nothing'}{f' by {source}' if source else ''}"
    for stage in decision.stages:
        if words := list(stage_words(stage)):
            yield stage.stage, "; ".join(words)
    if bounds := [f"{role} {count}" for role, count in decision.lower_bounds.items() if count > 1]:
        yield "lower bound", ", ".join(bounds)
    if decision.clamped:
        yield "clamped", "; ".join(decision.clamped)
    estimates = (("TTFT", decision.load.estimated_ttft_ms), ("ITL", decision.load.estimated_itl_ms))
    if estimated := [f"{name} {value:.4g} ms" for name, value in estimates if value is not None]:
        yield "estimated", ", ".join(estimated)
    rejected = f"; rejected by {decision.rejected_by}: {decision.reject_reason}" if decision.rejected_by else ""
    limits = f"; limits {', '.join(decision.limits)}" if decision.limits else ""
    yield (
        "reason",
        f"{decision.action}; load {reason(decision.load)}; throughput {reason(decision.throughput)}{limits}{rejected}",
    )


def reason(proposal: LoadProposal | ThroughputProposal) -> str:
    """Return the reason of a proposal, with those of its roles where they say more."""
    roles = (("prefill", proposal.reason_prefill), ("decode", proposal.reason_decode))
    more = [f"{name} {one.value}" for name, one in roles if one.value not in {"unset", proposal.reason.value}]
    return proposal.reason.value + (f" ({', '.join(more)})" if more else "")


def stage_words(stage: SavedStage) -> Iterator[str]:
    """Yield what each plugin of a stage did, and which bounds changed the result."""
    for one in stage.results:
        if targets := one.targets:
            numbers = ", ".join(f"{each.sub_component_type} {each.type.name} {each.replicas}" for each in targets)
            cause = one.result.get("reason")
            yield f"{one.plugin_id}: {numbers}" + (f" ({cause})" if cause else "")
        elif stage.outcome is not None and stage.outcome.rejected_by == one.plugin_id:
            yield f"{one.plugin_id}: rejected: {stage.outcome.reject_reason}"
    yield from (f"{plugin}: last result held" for plugin in stage.held)
    yield from (f"{plugin}: failed: {cause}" for plugin, cause in stage.failed)
    yield from (f"{plugin}: skipped: {cause}" for plugin, cause in stage.skipped)
    if stage.outcome is not None:
        yield from (f"{one.component}: {one.bound.value} of {one.plugin_id}" for one in stage.outcome.clamped)


def difference(recorded: bytes, computed: bytes) -> str:
    """Return the first field in which two decisions differ. Raise `ConfigError` if one is not JSON."""
    try:
        before, after = msgspec.json.decode(recorded), msgspec.json.decode(computed)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the decision is damaged: {error}") from None
    path, old, new = first_difference("", before, after)
    return f"{path or 'the decision'}: recorded {msgspec.json.encode(old).decode()}, now {msgspec.json.encode(new).decode()}"


def first_difference(path: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """Return the path of the first different value and both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if key not in old or key not in new or old[key] != new[key]:
                return first_difference(f"{path}.{key}" if path else key, old.get(key), new.get(key))
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, (one, other) in enumerate(zip(old, new, strict=True)):
            if one != other:
                return first_difference(f"{path}[{at}]", one, other)
    return path, old, new
