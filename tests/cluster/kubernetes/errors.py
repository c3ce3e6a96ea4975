"""API errors and their Status bodies."""

from typing import Any

Object = dict[str, Any]

REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed",
    406: "NotAcceptable", 409: "Conflict", 410: "Expired", 413: "RequestEntityTooLarge", 415: "UnsupportedMediaType",
    422: "Invalid", 429: "TooManyRequests", 500: "InternalError", 504: "Timeout",
}  # fmt: skip
MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"


class ApiError(Exception):
    """A refused request: HTTP status, reason, message and details."""

    def __init__(self, code: int, message: str, reason: str = "", details: Object | None = None) -> None:
        super().__init__(message)
        self.code, self.message = code, message
        self.reason = reason or REASONS.get(code, "")
        self.details = details

    def status(self) -> Object:
        """Return the body of the response."""
        body = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        }  # fmt: skip
        return {**body, "details": self.details} if self.details else body


def cause(reason: str, message: str, field: str) -> Object:
    """Return one entry of `details.causes`."""
    return {"reason": reason, "message": message, "field": field}


def required(field: str, detail: str = "") -> Object:
    return cause("FieldValueRequired", "Required value" + (f": {detail}" if detail else ""), field)


def invalid_value(field: str, value: object, detail: str) -> Object:
    return cause("FieldValueInvalid", f"Invalid value: {quoted(value)}: {detail}", field)


def forbidden_field(field: str, detail: str) -> Object:
    return cause("FieldValueForbidden", f"Forbidden: {detail}", field)


def not_supported(field: str, value: object, allowed: list[Any]) -> Object:
    values = ", ".join(quoted(one) for one in allowed)
    return cause("FieldValueNotSupported", f"Unsupported value: {quoted(value)}: supported values: {values}", field)


def duplicate(field: str, value: object) -> Object:
    return cause("FieldValueDuplicate", f"Duplicate value: {quoted(value)}", field)


def quoted(value: object) -> str:
    """Write a value as the messages of the API server do."""
    import json

    return json.dumps(value, separators=(",", ":")) if not isinstance(value, bool) else str(value).lower()


def invalid(group: str, kind: str, name: str, causes: list[Object]) -> ApiError:
    """Return 422 with one cause for each field."""
    lines = [f"{one['field']}: {one['message']}" for one in causes]
    text = lines[0] if len(lines) == 1 else "[" + ", ".join(lines) + "]"
    qualified = f"{kind}.{group}" if group else kind
    details = {"name": name, "group": group, "kind": kind, "causes": causes}
    return ApiError(422, f'{qualified} "{name}" is invalid: {text}', details={k: v for k, v in details.items() if v})


def about(code: int, group: str, plural: str, name: str, message: str, reason: str = "") -> ApiError:
    """Return an error about a named object of a resource."""
    details = {"name": name, "group": group, "kind": plural}
    return ApiError(code, message, reason, {key: value for key, value in details.items() if value})


def qualified(group: str, plural: str) -> str:
    return f"{plural}.{group}" if group else plural


def not_found(group: str, plural: str, name: str) -> ApiError:
    return about(404, group, plural, name, f'{qualified(group, plural)} "{name}" not found')


def already_exists(group: str, plural: str, name: str) -> ApiError:
    return about(409, group, plural, name, f'{qualified(group, plural)} "{name}" already exists', "AlreadyExists")


def conflict(group: str, plural: str, name: str, message: str = MODIFIED) -> ApiError:
    text = f'Operation cannot be fulfilled on {qualified(group, plural)} "{name}": {message}'
    return about(409, group, plural, name, text)


def forbidden(group: str, plural: str, name: str, message: str, causes: list[Object] | None = None) -> ApiError:
    error = about(403, group, plural, name, f'{qualified(group, plural)} "{name}" is forbidden: {message}')
    if causes:
        error.details = {**(error.details or {}), "causes": causes}
    return error


def expired(message: str) -> ApiError:
    return ApiError(410, message)
