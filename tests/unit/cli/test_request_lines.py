"""Request lines: one line per request under a heading, and a waterfall to scale."""

from dynamo.cli.request_lines import BAR, detail, duration, explained, heading, line, waterfall
from dynamo.console.request_views import MoveView, RequestView, Stage

VIEW = RequestView(
    id="4f3a0000-1111-2222-3333-444455556666",
    model="m",
    endpoint="chat_completions",
    type="stream",
    state="succeeded",
    total_ms=1500.0,
    ttft_ms=900.0,
    itl_ms=12.34,
    prompt_tokens=640,
    cached_tokens=600,
    output_tokens=20,
    workers=["ab"],
    cause="router-queue",
    explanation="60 % went to the queue.",
)


def test_line_is_aligned_with_the_heading() -> None:
    text = line(VIEW)
    assert text.split()[1:] == ["4f3a0000", "succeeded", "m", "1.50", "s", "900.0", "ms", "12.3", "ms", "640(600)>20", "ab", "router-queue"]  # fmt: skip
    assert text.index("router-queue") == heading().index("cause")
    assert text.index("ab") == heading().index("worker")
    assert explained(VIEW).splitlines()[1].strip() == VIEW.explanation


def test_refused_request_without_a_model_or_a_worker_has_a_line() -> None:
    view = RequestView(id="", model="", endpoint="e", type="", state="failed", error_type="not_found")
    assert "refused" in line(view)
    assert "not_found" in line(view)
    assert line(view).split()[-3:] == ["-", "-", "-"]
    assert "0>0" not in line(view)
    assert "tokens   -\n" in detail(view)
    assert explained(view) == line(view)


def test_waterfall_is_to_scale_and_marks_what_is_in_progress() -> None:
    first, second = waterfall([Stage("route", 0.0, 250.0), Stage("first_token", 250.0, None)], 1000.0)
    assert first.count("#") == BAR / 4
    assert second.count("#") == 3 * BAR / 4
    assert second.endswith("750.0 ms so far")


def test_detail_shows_the_cause_and_every_move() -> None:
    view = RequestView(
        id="r", model="m", endpoint="e", type="stream", state="succeeded", total_ms=100.0, cost=2.5, overlap_blocks=3, blocks=4,
        prefill_worker="cd", workers=["ab"], explanation="Why.", moves=[MoveView(50.0, "ef", "connection lost", 7)],
    )  # fmt: skip
    text = detail(view)
    for words in (
        "prefill cd, ab",
        "cost 2.5, 3 of 4 blocks",
        "Why.",
        "after 50.0 ms and 7 tokens ef failed: connection lost",
    ):
        assert words in text


def test_duration_has_a_unit() -> None:
    assert [duration(value) for value in (None, 0.04, 999.0, 61_000.0)] == ["-", "0.0 ms", "999.0 ms", "61.00 s"]
