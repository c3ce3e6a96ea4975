"""Statuses: map a failure to a gRPC status, by way of its HTTP status. Pure."""

from msgspec.structs import replace

from dynamo.core.errors import DynamoException, InvalidArgument, Unknown
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


class RequestRefused(DynamoException):
    """Request that already has an error response."""

    def __init__(self, answer: ErrorAnswer) -> None:
        super().__init__(answer.message)
        self.answer = answer


def shown(error: DynamoException) -> DynamoException:
    """Return a failure of a tensor model with its own text, which the frontend otherwise hides.

    Its text is a backend's message about tensors, as of Triton, whose clients read nothing else.
    """
    if isinstance(error, InvalidArgument) and not error.is_public:
        return InvalidArgument(str(error), param=error.param)
    return RequestRefused(replace(answer_to(error), message=str(error))) if isinstance(error, Unknown) else error


def status_of(error: BaseException) -> tuple[str, str]:
    """Return the name of the status and its message."""
    answer = error.answer if isinstance(error, RequestRefused) else answer_to(error)
    if answer.label == "overload":  # Its HTTP status is set by the operator.
        return "RESOURCE_EXHAUSTED", answer.message
    return BY_HTTP_STATUS.get(answer.status, "INTERNAL"), answer.message
