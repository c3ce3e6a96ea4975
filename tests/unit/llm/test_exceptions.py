"""Exceptions: one tree under two addresses."""

import pytest

from dynamo.core import errors
from dynamo.llm import HttpError, exceptions


def test_exception_names_are_the_core_error_classes() -> None:
    for name in exceptions.__all__:
        assert getattr(exceptions, name) is getattr(errors, name)
        assert issubclass(getattr(exceptions, name), exceptions.DynamoException)


def test_http_error_has_a_status_and_a_bounded_message() -> None:
    error = HttpError(429, "slow down")
    assert (error.code, error.message) == (429, "slow down")
    assert len(HttpError(400, "x" * 10_000).message) == 8192


@pytest.mark.parametrize(("code", "message"), [(600, "m"), (-1, "m"), (True, "m"), ("400", "m"), (400, 5)])
def test_invalid_http_status_is_refused(code: object, message: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        HttpError(code, message)  # type: ignore[arg-type]


def test_invalid_argument_is_a_value_error_as_in_upstream() -> None:
    with pytest.raises(ValueError, match="wrong"):
        raise exceptions.InvalidArgument("wrong", param="n")
