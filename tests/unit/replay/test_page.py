"""Page: what a capacity planner reads on it."""

from pathlib import Path

from dynamo.replay.main import main

LOAD = ["--input-tokens=2000", "--output-tokens=40", "--request-count=150", "--request-rate=20", "--num-workers=3"]


def page_of(tmp_path: Path, *flags: str) -> str:
    path = tmp_path / "page.html"
    main([*LOAD, *flags, f"--report-html={path}"])
    return path.read_text()


def test_page_says_what_was_run_and_how_many_requests_met_each_objective(tmp_path: Path) -> None:
    text = page_of(tmp_path, "--router-mode=balanced", "--sla-ttft-ms=500", "--sla-itl-ms=1")
    assert "synthetic, 2000 prompt tokens, 40 output tokens: 150 requests" in text
    assert "3 workers" in text
    assert "TTFT 500 ms, ITL 1 ms" in text
    assert "class=met>100.0 %" in text
    assert "class=missed>0.0 %" in text
    assert "<th>p50<th>p90<th>p99" in text
    assert "objective: 500 ms" in text
    assert "worker-seconds" in text


def test_page_marks_failures_restarts_and_scaling_decisions(tmp_path: Path) -> None:
    text = page_of(tmp_path, "--fail=1@2+1", "--restart=0@4", "--scale-at=3=5")
    assert "worker 1 fails" in text
    assert "worker 0 is restarted" in text
    assert "aggregated: 3 to 5 workers" in text
    assert "Failures, restarts and scaling decisions (vertical lines): 3" in text


def test_page_shows_workers_as_a_map_and_fits_a_phone(tmp_path: Path) -> None:
    text = page_of(tmp_path)
    assert "Requests by worker" in text
    assert "<rect" in text
    assert "width=device-width,initial-scale=1" in text
    assert "overflow-x:auto" in text
    assert "minmax(min(340px,100%),1fr)" in text


def test_page_plots_the_routers_queue(tmp_path: Path) -> None:
    quiet, queued = (
        page_of(tmp_path),
        page_of(tmp_path, "--router-mode=balanced", "--arrival-seed=3", "--num-workers=1"),
    )
    title = "Waiting requests in the router&#x27;s queue"
    assert title in quiet
    assert quiet.split(title)[2].split("</section>")[0] != queued.split(title)[2].split("</section>")[0]


def test_page_of_a_disaggregated_cluster_separates_the_roles(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    main([*LOAD[:-1], "--num-prefill-workers=1", "--num-decode-workers=2", f"--report-html={path}"])
    text = path.read_text()
    assert "Requests by worker (P prefill, D decode)" in text
    assert [f">{name}</text>" in text for name in ("P0", "D1", "D2")] == [True] * 3
    assert "round_robin: prefill</span>" in text
    assert "round_robin: decode</span>" in text


def test_page_of_a_comparison_marks_a_failure_once_in_every_plot(tmp_path: Path) -> None:
    text = page_of(tmp_path, "--router-mode=kv", "--compare=round_robin", "--fail=1@2+1")
    assert "<dd>kv, round_robin" in text
    assert "<td>all runs<td>2.0 s<td class=words" in text
    plots, maps = 6, 4
    assert text.count("<title>worker 1 fails</title>") == plots + maps
