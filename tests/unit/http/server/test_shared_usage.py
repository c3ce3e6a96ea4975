"""Limits of keys hold across processes that share a folder, of which each has its own file descriptors and memory."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo.http.server import shared_usage
from dynamo.http.server.access import ApiCaller, KeyLimits
from dynamo.http.server.shared_usage import SharedUsage

KEY = "sk-0123456789abcdef0123456789abcdef"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[SharedUsage]]:
    made = [SharedUsage(str(tmp_path), index) for index in range(3)]
    yield made
    for one in made:
        one.close()


def callers(processes: list[SharedUsage], **limits: int) -> list[ApiCaller]:
    return [ApiCaller(KeyLimits(name="team", key=KEY, **limits), one) for one in processes]


def test_requests_per_minute_hold_across_processes(processes: list[SharedUsage]) -> None:
    own = callers(processes, requests_per_minute=6)
    refused = [own[number % 3].admit(100.0) for number in range(9)]
    assert [one is None for one in refused] == [True] * 6 + [False] * 3
    assert {one.limit for one in refused[6:] if one is not None} == {"requests_per_minute"}
    assert own[1].admit(110.0) is None, "one has refilled after ten seconds"
    assert own[2].admit(110.0) is not None


def test_concurrent_requests_hold_across_processes(processes: list[SharedUsage]) -> None:
    own = callers(processes, concurrent_requests=2)
    assert [own[0].admit(1.0), own[1].admit(1.0)] == [None, None]
    assert all(one.admit(1.0) is not None for one in own)
    own[0].release()
    assert own[2].admit(1.0) is None
    assert own[0].admit(1.0) is not None


def test_tokens_of_one_process_are_spent_for_all(processes: list[SharedUsage]) -> None:
    own = callers(processes, tokens_per_minute=100)
    own[0].spend(160, 10.0)
    too_much = own[1].admit(10.0)
    assert too_much is not None and (too_much.limit, too_much.retry_after_s) == ("tokens_per_minute", 37)
    assert own[1].admit(47.0) is None


def test_restarted_process_drops_its_requests_in_progress_and_no_others(
    processes: list[SharedUsage], tmp_path: Path
) -> None:
    own = callers(processes, concurrent_requests=2, requests_per_minute=3)
    assert own[0].admit(1.0) is None and own[1].admit(1.0) is None
    again = SharedUsage(str(tmp_path), 0)
    (other,) = callers([again], concurrent_requests=2, requests_per_minute=3)
    assert other.admit(1.0) is None, "its own earlier request counts no more"
    too_much = other.admit(1.0)
    assert too_much is not None and too_much.limit == "concurrent_requests"
    other.release()
    too_much = other.admit(1.0)
    assert too_much is not None and too_much.limit == "requests_per_minute", "rates are kept"
    again.close()


def test_keys_count_separately_and_without_limits_not_at_all(processes: list[SharedUsage]) -> None:
    (first,) = callers(processes[:1], requests_per_minute=1)
    other = ApiCaller(KeyLimits(name="other", key=KEY[::-1], requests_per_minute=1), processes[1])
    free = ApiCaller(KeyLimits(name="team", key=KEY), processes[2])
    assert first.admit(1.0) is None and other.admit(1.0) is None
    assert first.admit(1.0) is not None
    assert all(free.admit(1.0) is None for _ in range(5))


def test_more_keys_than_rows_have_limits_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_usage, "ROWS_MAX", 2)
    usage = SharedUsage(str(tmp_path), 0)
    own = [
        ApiCaller(KeyLimits(name=f"k{number}", key=f"{KEY}{number}", requests_per_minute=1), usage)
        for number in range(3)
    ]
    assert [[one.admit(1.0) is None for _ in range(2)] for one in own] == [[True, False]] * 3
    usage.close()


def test_process_that_is_stopped_with_the_lock_does_not_stop_the_others(processes: list[SharedUsage]) -> None:
    own = callers(processes, requests_per_minute=1)
    with processes[0]._locked():
        assert own[1].admit(1.0) is None
    assert own[2].admit(1.0) is not None


def test_file_is_sparse_and_private(processes: list[SharedUsage], tmp_path: Path) -> None:
    facts = os.stat(tmp_path / shared_usage.FILE)
    assert facts.st_mode & 0o777 == 0o600
    assert facts.st_blocks * 512 < 1 << 20
