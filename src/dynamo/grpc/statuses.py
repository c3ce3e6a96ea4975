"""Statuses: which gRPC status a failure becomes. Pure; the HTTP status, which says the same, is decided first."""

from dynamo.core.errors import DynamoException
from dynamo.serving.errors import ErrorAnswer, answer_to

BY_HTTP_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "RESOURCE_EXHAUSTED",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class Refused(DynamoException):
    """A request that was answered with an error already."""

    def __init__(self, answer: ErrorAnswer) -> None:
        super().__init__(answer.message)
        self.answer = answer


def status_of(error: BaseException) -> tuple[str, str]:
    """The name of a status, and what is said with it."""
    answer = error.answer if isinstance(error, Refused) else answer_to(error)
    if answer.label == "overload":  # Its HTTP status is the operator's choice.
        return "RESOURCE_EXHAUSTED", answer.message
    return BY_HTTP_STATUS.get(answer.status, "INTERNAL"), answer.message
