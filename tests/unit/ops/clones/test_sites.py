"""Areas of paths and order of sites."""

import pytest

from dynamo.ops.clones.sites import Bucket, CloneSite, area_of, ranked, shortened


@pytest.mark.parametrize(
    ("path", "area"),
    [
        ("lib/llm/src/backend.rs", "request path"),
        ("/x/lib/llm/src/http/service/openai.rs", "request path"),
        ("lib/kv-router/src/scheduling/queue.rs", "routing"),
        ("lib/kvbm-engine/src/offload/a.rs", "block manager"),
        ("lib/runtime/src/pipeline/network.rs", "runtime"),
        ("src/dynamo/serving/pipeline.py", "request path"),
        ("lib/bench/src/main.rs", "other"),
    ],
)
def test_area_is_that_of_the_beginning_of_the_path(path: str, area: str) -> None:
    assert area_of(path)[0] == area


def test_actionable_sites_are_selected() -> None:
    sites = [
        CloneSite(path="a.rs", line=line, snippet="", kind="clone", bucket=bucket)
        for line, bucket in enumerate((Bucket.SHARED, Bucket.MOVE, Bucket.API))
    ]
    assert [one.bucket for one in ranked(sites, only_actionable=True)] == [Bucket.MOVE, Bucket.API]


def test_snippets_are_one_bounded_line() -> None:
    assert shortened("a\n  b") == "a b"
    assert len(shortened("x" * 300)) == 96
