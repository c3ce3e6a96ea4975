"""Rules of the retries of a request on other workers."""

import pytest

from dynamo.core.errors import (
    CannotConnect,
    CannotResume,
    Disconnected,
    InvalidArgument,
    StreamIncomplete,
    Unknown,
    WorkerUnavailable,
)
from dynamo.serving.attempts import (
    RETRY_FIRST_S,
    RETRY_MAX_S,
    SENDS_MAX,
    Attempts,
    connection_broke,
    is_retryable,
    more_informative,
)


@pytest.mark.parametrize(
    ("error", "is_retried"),
    [
        (WorkerUnavailable("x"), True),
        (Disconnected("x"), True),
        (CannotResume("x"), False),
        (InvalidArgument("x"), False),
        (Unknown("x"), False),
        (ValueError("x"), False),
    ],
)
def test_errors_of_workers_are_retryable_and_errors_of_requests_are_not(error: Exception, is_retried: bool) -> None:
    assert is_retryable(error) is is_retried


def test_only_a_lost_connection_counts_as_broken() -> None:
    assert connection_broke(Disconnected("x")) and connection_broke(StreamIncomplete("x"))
    assert not connection_broke(CannotConnect("x")) and not connection_broke(Unknown("x"))


def test_missing_workers_error_does_not_replace_the_request_failure() -> None:
    first, last = Disconnected("first"), CannotConnect("last")
    assert more_informative(first, WorkerUnavailable("none left")) is first
    assert more_informative(first, last) is last


def test_request_without_a_token_has_a_bounded_number_of_sends() -> None:
    attempts = Attempts()
    for _ in range(SENDS_MAX - 1):
        assert attempts.may_send_again
        attempts.count_send()
    assert not attempts.may_send_again and not attempts.may_migrate


def test_migration_resets_the_send_count_and_uses_the_migration_limit() -> None:
    attempts = Attempts(migrations_max=1)
    for _ in range(SENDS_MAX - 1):
        attempts.count_send()
    assert attempts.may_migrate
    attempts.count_migration()
    assert attempts.may_send_again and not attempts.may_migrate


def test_ended_request_is_not_retried() -> None:
    attempts = Attempts(migrations_max=5)
    attempts.end()
    assert not attempts.may_send_again and not attempts.may_migrate


def test_only_workers_with_a_broken_connection_are_readmitted() -> None:
    attempts = Attempts()
    attempts.exclude(1, may_recover=False)
    assert not attempts.can_readmit
    attempts.exclude(2, may_recover=True)
    assert attempts.can_readmit and attempts.excluded == {1, 2}
    attempts.readmit()
    assert attempts.excluded == {1} and not attempts.can_readmit


def test_readmission_delay_doubles_until_the_request_makes_progress() -> None:
    attempts = Attempts()
    delays = [attempts.readmission_delay_s(0, 1.0) for _ in range(6)]
    assert delays[:3] == [RETRY_FIRST_S, 2 * RETRY_FIRST_S, 4 * RETRY_FIRST_S] and delays[-1] == RETRY_MAX_S
    assert attempts.readmission_delay_s(3, 1.0) == RETRY_FIRST_S
    assert attempts.readmission_delay_s(3, 1.0) == 2 * RETRY_FIRST_S
