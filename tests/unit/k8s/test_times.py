"""Times in Kubernetes objects."""

from dynamo.k8s.times import micro_time, seconds_time


def test_times_are_utc_with_seconds_or_microseconds() -> None:
    assert seconds_time(1_700_000_000.75) == "2023-11-14T22:13:20Z"
    assert micro_time(1_700_000_000.75) == "2023-11-14T22:13:20.750000Z"
