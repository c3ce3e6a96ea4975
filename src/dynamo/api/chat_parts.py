"""Parts of chat requests and checks that the converters of other APIs share."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dynamo.protocols.openai import ContentPart
from dynamo.protocols.strict import refuse

UNSUPPORTED = "is not supported by this release"
UnsupportedFields = Sequence[tuple[str, Callable[[Any], bool], str]]
"""Fields, each with the test of a value that is not supported, and the reason in the error."""


def function_tool(
    name: str,
    description: str | None,
    parameters: dict[str, Any] | None,
    *,
    strict: bool | None = None,
    input_examples: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Return a tool in chat form, as shown to the chat template; unset fields are omitted."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    if input_examples:
        function["input_examples"] = input_examples
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def chosen_function(name: str) -> dict[str, Any]:
    """Return the tool choice of one function."""
    return {"type": "function", "function": {"name": name}}


def image_part(url: str, detail: str | None = None) -> ContentPart:
    """Return the content part of an image."""
    image = {"url": url} if detail is None else {"url": url, "detail": detail}
    return msgspec.convert({"type": "image_url", "image_url": image}, ContentPart)


def refuse_callers(allowed_callers: Sequence[str] | None, where: str) -> None:
    """Raise `InvalidArgument` for a tool that only other tools may call."""
    if allowed_callers is not None and "direct" not in allowed_callers:
        refuse(f"{where}.allowed_callers", "without `direct` is not supported by this release")


def refuse_fields(request: object, fields: UnsupportedFields) -> None:
    """Raise `InvalidArgument` for the first field with an unsupported value."""
    for name, is_unsupported, why in fields:
        if is_unsupported(getattr(request, name)):
            refuse(name, why)
