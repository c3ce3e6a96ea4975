"""Command `dynamo pr-review`: the steps of a review on one GPU, their run, and a draft from a diff and evidence. It posts nothing."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.core.config import environ, load, option, split_arguments
from dynamo.core.errors import ConfigError
from dynamo.ops.archive import tail_of
from dynamo.ops.doctor.command import print_report
from dynamo.ops.doctor.host import gpu_facts
from dynamo.ops.report import CheckRow, exit_status, failed, passed, row_value
from dynamo.ops.reviews.diff import added_lines
from dynamo.ops.reviews.perf_patterns import Impact, findings, overall
from dynamo.ops.reviews.pr_claims import FAILURES, evidence_of, failure_lines, load_command
from dynamo.ops.reviews.pr_run import ReviewRun, run_review
from dynamo.ops.reviews.records import slug

MODEL = "Qwen/Qwen3-0.6B"
VERDICTS = ("Approve", "Request changes", "Comment")
GPUS_MAX = 1
DIRECTORY, INDEX = "dynamo-pr-reviews", "INDEX.md"
TESTS = ("unit", "E2E non-streaming", "E2E streaming", "normal request", "load", "logs")
LOAD = shlex.join(load_command("aiperf", MODEL, "localhost:8000", 16, 256, None, None))
STEPS = (
    "0. Inputs: PR {pr}; hardware: one GPU of 24 GB; stop if the change needs more",
    "1. Check out: git status --porcelain must be empty; note the branch; git worktree add ../pr-{pr} with an environment of its own",
    "2. Build: .venv must be no symbolic link; pip install -e . in it",
    "3. Services: NATS on 4222 and etcd on 2379 or 12379 (ETCD_ENDPOINTS), if the change concerns them",
    "4. Launch: DYN_SYSTEM_PORT=8081 dynamo serve {model} --engine sglang; ready when /v1/models lists it; stop at: {failures}",
    "5. Tests: structure of a response; the same text streamed and not at temperature 0; load, 2 or 3 times: {load}",
    "6. Analyse: responses, logs, GET :8000/metrics and :8081/metrics; against the base for a claim of performance",
    "7. Report: dynamo pr-review {pr} --run --diff FILE does steps 1 to 6 and writes a draft; publish it after approval, as COMMENT",
    "8. Keep: {directory}/{pr}-*/review.md and a row of {directory}/INDEX.md; remove the worktree",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrReviewConfig:
    """Print the steps of a review; with --run do them here, with --evidence write the draft of what was captured."""

    pr: str | None = option(None, "PR", None, "Number of the pull request, or its URL")
    diff: str | None = option(None, "--diff", None, "Unified diff of the change")
    evidence: str | None = option(
        None,
        "--evidence",
        None,
        "JSON: title, summary, verdict, tests {name: result}, log, comments [{path, line, body}]",
    )
    run: bool = option(False, "--run", None, "Run steps 1 to 6 in this checkout and write the draft of what they show")
    engine: str = option("sglang", "--engine", None, "With --run: engine of dynamo serve; its own arguments after --")
    model: str = option(MODEL, "--model", None, "With --run: model to serve; empty for the engine's bundled one")
    http_port: int = option(8000, "--http-port", None, "With --run: port of the frontend")
    system_port: int = option(8081, "--system-port", None, "With --run: port of the worker's metrics")
    ready_timeout: float = option(600.0, "--ready-timeout", None, "With --run: seconds until the model is listed")
    repeats: int = option(2, "--repeats", None, "With --run: number of loads; 0 for none")
    concurrency: int = option(16, "--concurrency", None, "With --run: concurrent requests of a load")
    requests: int = option(256, "--requests", None, "With --run: requests of a load")
    aiperf: str = option("aiperf", "--aiperf", None, "With --run: program of the load generator")
    tokenizer: str | None = option(None, "--tokenizer", None, "With --run: tokenizer for aiperf; default: the model's")
    gpus: int = option(1, "--gpus", None, "GPUs that the change needs")
    output: str = option(DIRECTORY, "--output", None, "Directory of the drafts")
    json: bool = option(False, "--json", None, "Print JSON")

    def __post_init__(self) -> None:
        if self.run and self.evidence is not None:
            raise ConfigError("--run and --evidence are mutually exclusive: --run captures the evidence itself")
        for name, least in (("repeats", 0), ("concurrency", 1), ("requests", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be at least {least}")


def pr_review(argv: Sequence[str]) -> int:
    """Run `dynamo pr-review`; return 1 if the hardware does not suffice or a check fails. Raise `ConfigError` for wrong options."""
    own, arguments = split_arguments(argv)
    config = load(PrReviewConfig, own, prog="dynamo pr-review")
    if not config.pr:
        raise ConfigError("PR: missing; give the number of the pull request")
    if arguments and not config.run:
        raise ConfigError("--: arguments of the engine require --run")
    number = slug(config.pr).removeprefix("issue-")
    if config.run:
        return _run(number, config, tuple(arguments))
    if config.evidence is None:
        return _print_steps(number, config)
    return _draft(number, config, read_evidence(config.evidence))


def _run(number: str, config: PrReviewConfig, arguments: tuple[str, ...]) -> int:
    """Pass the gate, run the steps and write the draft; return 1 if a check fails. Raise `ConfigError`."""
    gate = gate_row(config.gpus, len(gpu_facts(environ()).gpus))
    if exit_status([gate]):
        print_report([gate], is_json=config.json)
        return 1
    run = ReviewRun(
        engine=config.engine,
        model=config.model,
        arguments=arguments,
        http_port=config.http_port,
        system_port=config.system_port,
        ready_s=config.ready_timeout,
        repeats=config.repeats,
        concurrency=config.concurrency,
        requests=config.requests,
        aiperf=config.aiperf,
        tokenizer=config.tokenizer,
    )
    try:
        found = run_review(run, Path(config.output) / f"{number}-artifacts")
    except OSError as error:
        raise ConfigError(f"--output {config.output}: {error.strerror}") from None
    rows = [gate, *found.rows]
    subject = f"{config.engine} {Path(config.model).name or 'demo'}"
    evidence = evidence_of(rows, found.tests, found.log, found.environment, subject)
    print_report(rows, is_json=config.json)
    _draft(number, config, evidence)
    return exit_status(rows)


def _draft(number: str, config: PrReviewConfig, evidence: Mapping[str, Any]) -> int:
    """Write the draft of a review. Raise `ConfigError`."""
    diff = "" if config.diff is None else _text(config.diff, "--diff")
    comments = comments_of(diff, evidence)
    text = review_text(evidence, diff, comments)
    folder = Path(config.output) / f"{number}-{slug(str(evidence.get('title') or 'review'))}"
    _write(folder, text, comments, Path(config.output) / INDEX, number, evidence)
    if config.run and config.json:
        return 0  # The report of the run is the output.
    if config.json:
        print(json.dumps({"review": str(folder / "review.md"), "event": "COMMENT", "comments": comments}, indent=2))
    else:
        print(f"{folder / 'review.md'}: draft, {len(comments)} comments; nothing was published")
    return 0


def _print_steps(number: str, config: PrReviewConfig) -> int:
    """Print the hardware gate and the steps; return 1 if the machine does not pass the gate."""
    gate = gate_row(config.gpus, len(gpu_facts(environ()).gpus))
    failures = FAILURES.pattern.replace("|", " | ")
    steps = [one.format(pr=number, model=MODEL, failures=failures, load=LOAD, directory=DIRECTORY) for one in STEPS]
    if config.json:
        print(json.dumps({"gate": row_value(gate), "steps": steps}, indent=2))
    else:
        print("\n".join([f"{gate.status.value}  {gate.check}: {gate.evidence}", *steps]))
    return exit_status([gate])


def gate_row(needed: int, present: int) -> CheckRow:
    """Return whether the machine suffices for the review. Pure."""
    if needed > GPUS_MAX:
        return failed("hardware", f"the change needs {needed} GPUs", "review it where they are; this flow uses one")
    if present < needed:
        return failed(
            "hardware", f"{present} GPUs here, {needed} needed", "use a machine with a GPU, or --gpus 0 for code alone"
        )
    return passed("hardware", f"{present} GPUs here, {needed} needed")


def read_evidence(path: str) -> dict[str, Any]:
    """Return the captured evidence. Raise `ConfigError`."""
    try:
        found = json.loads(_text(path, "--evidence"))
    except ValueError as error:
        raise ConfigError(f"--evidence {path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--evidence {path}: must be an object")
    if found.get("verdict", VERDICTS[2]) not in VERDICTS:
        raise ConfigError(f"--evidence {path}: verdict {found['verdict']!r}: must be {', '.join(VERDICTS)}")
    return found


def comments_of(diff: str, evidence: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the inline comments on added lines: the given ones, and costs of moderate or significant impact. Pure."""
    lines = added_lines(diff)
    known = {(one.path, one.number) for one in lines}
    given = [
        {"path": str(one["path"]), "line": int(one["line"]), "side": "RIGHT", "body": str(one["body"])}
        for one in evidence.get("comments") or ()
        if not diff or (str(one.get("path")), one.get("line")) in known
    ]
    costs = [
        {"path": one.path, "line": one.line, "side": "RIGHT", "body": f"{one.concern}: {one.why}. {one.fix}."}
        for one in findings(lines)
        if one.impact in {Impact.MODERATE, Impact.SIGNIFICANT}
    ]
    return given + costs


def review_text(evidence: Mapping[str, Any], diff: str, comments: Sequence[Mapping[str, Any]]) -> str:
    """Return the draft. Pure."""
    results = {str(name): str(result) for name, result in (evidence.get("tests") or {}).items()}
    problems = failure_lines(str(evidence.get("log") or ""))
    results.setdefault("logs", f"{len(problems)} failure lines" if problems else "no failure line")
    rows = [
        f"| {name} | {results.get(name, 'not run')} |"
        for name in (*TESTS, *(one for one in results if one not in TESTS))
    ]
    default = "Request changes" if problems else "Comment"
    lines = [
        "## Review Summary",
        "",
        f"**Verdict:** {evidence.get('verdict') or default}",
        "",
        str(evidence.get("summary") or "Draft: describe what was reviewed and the result."),
        "",
        "### Testing Results",
        "",
        "| Test | Result |",
        "|---|---|",
        *rows,
        "",
        "<details><summary>Evidence</summary>",
        "",
        *(f"    {line}" for line in problems or ["no failure line in the log"]),
        "",
        "</details>",
        "",
        "### Code Review",
        "",
        f"- Performance impact of the added lines: {overall(findings(added_lines(diff))).value}",
        *(f"- {one['path']}:{one['line']}: {one['body']}" for one in comments),
    ]
    return "\n".join(lines) + "\n"


def _write(
    folder: Path,
    text: str,
    comments: Sequence[Mapping[str, Any]],
    index: Path,
    number: str,
    evidence: Mapping[str, Any],
) -> None:
    row = f"| {number} | {evidence.get('title') or ''} | {evidence.get('verdict') or 'draft'} | {folder.name}/review.md |\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "review.md").write_text(text, encoding="utf-8")
        (folder / "comments.json").write_text(json.dumps(comments, indent=2) + "\n", encoding="utf-8")
        before = (
            index.read_text(encoding="utf-8")
            if index.exists()
            else "| PR | Title | Verdict | Review |\n|---|---|---|---|\n"
        )
        kept = [line for line in before.splitlines(keepends=True) if not line.startswith(f"| {number} |")]
        index.write_text("".join([*kept, row]), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {folder}: {error.strerror}") from None


def _text(path: str, flag: str) -> str:
    try:
        return tail_of(path).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
