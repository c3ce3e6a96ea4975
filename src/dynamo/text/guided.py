"""GuidedDecoding: the output constraint of a request, in the form sent to engines. Pure.

    guided_decoding(request, card.runtime_config)    one constraint, None, or InvalidArgument that names the field

A mandatory call (`tool_choice` required or named) takes precedence over `response_format`, which excludes the
`guided_*` fields: an answer has one constraint. Engines reject what they cannot compile; this module rejects only what
no engine accepts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from dynamo.core.errors import InvalidArgument
from dynamo.model_card.tool_call_tags import AllowedCalls, TaggedTool, TagPolicy, structural_tag
from dynamo.protocols.engine import GuidedDecoding
from dynamo.protocols.model_card import RuntimeConfig
from dynamo.protocols.openai import ChatCompletionRequest, CommonRequest
from dynamo.protocols.openai_ranges import chosen_tool, is_call_forced
from dynamo.text.strict_schemas import check_strict

SCHEMA_BYTES_MAX = 1 << 18  # Far above any hand-written schema.
TEXT_CHARS_MAX = 1 << 16  # Of a regular expression, a grammar or the choices.
CHOICES_MAX = 4096
SCHEMAS_MAX = 8192  # Schemas nested in one; checking takes a few milliseconds per thousand.
DEPTH_MAX = 64  # Nesting depth of schemas; compilers recurse.

INVALID = "Validation: "
MALFORMED = "Failed to deserialize the JSON body into the target type: "
FIELDS = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}
"""The constraint on the wire, and the field of the request."""

TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
SCHEMAS = (
    "items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames",
    "contains", "not", "if", "then", "else",
)  # fmt: skip
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


def guided_decoding(request: CommonRequest, config: RuntimeConfig) -> GuidedDecoding | None:
    """Return the constraint of a request for a model; None if its text is free. Raise `InvalidArgument`."""
    if not isinstance(request, ChatCompletionRequest):
        return _requested_constraint(request)
    for number, tool in enumerate(request.tools or ()):
        function = tool["function"]
        if function.get("strict") is True and function.get("parameters") is not None:
            where = f"tools[{number}].function.parameters"
            _check_size(function["parameters"], where)
            check_strict(function["parameters"], function["name"], where)
    if is_call_forced(request):
        given = _given(request)
        if given:
            message = f"tool_choice constrains the answer; it cannot be combined with {FIELDS[given[0]]}"
            raise InvalidArgument(f"{INVALID}{message}", param=FIELDS[given[0]])
        return _forced_call(request, config)
    requested = _requested_constraint(request)
    if requested is not None or not request.tools or request.tool_choice == "none":
        return requested
    return _free_calls(request, config)


def form_bytes(request: CommonRequest) -> int:
    """Return the approximate size in bytes of the constraints to check."""
    size = 0
    form = request.response_format
    if form is not None and form.type != "text":
        size += _bytes_of(form)
    if request.guided_json is not None:
        size += _bytes_of(request.guided_json)
    if isinstance(request, ChatCompletionRequest) and request.tools:
        is_checked = is_call_forced(request) or any(tool["function"].get("strict") for tool in request.tools)
        size += _bytes_of(request.tools) if is_checked else 0
    return size


# ---- constraints of the request itself -------------------------------------------------------------------------------


def _given(request: CommonRequest) -> list[str]:
    """Return the constraints among the `guided_*` fields; an empty list of choices is ignored."""
    given = [kind for kind, field in FIELDS.items() if getattr(request, field) is not None]
    return [kind for kind in given if kind != "choice" or request.guided_choice]


def _requested_constraint(request: CommonRequest) -> GuidedDecoding | None:
    given = _given(request)
    form = request.response_format
    formed = None if form is None or form.type == "text" else _form(form)
    if formed is not None and formed.structural_tag is not None and given:
        raise _several(["structural_tag", *given], "response_format")
    if formed is not None and formed.json is not None and given and given != ["json"]:
        raise _several(["json", *given], "response_format")
    if len(given) > 1:
        raise _several(given, FIELDS[given[1]])
    guided = GuidedDecoding() if formed is None else formed
    if given:
        (kind,) = given
        setattr(guided, kind, CHECKS[kind](getattr(request, FIELDS[kind])))
    elif formed is None:
        return None
    guided.backend = request.guided_decoding_backend
    guided.whitespace_pattern = request.guided_whitespace_pattern
    if guided.whitespace_pattern is not None:
        _check_pattern(guided.whitespace_pattern, "guided_whitespace_pattern")
    return guided


def _several(kinds: Sequence[str], param: str) -> InvalidArgument:
    names = ", ".join(dict.fromkeys(kinds))
    return InvalidArgument(f"Only one guided-decoding constraint can be set; received: {names}", param=param)


def _form(form: Any) -> GuidedDecoding:
    """Return the constraint of a `response_format` other than `text`."""
    if form.type == "json_object":
        return GuidedDecoding(json={"type": "object"})
    if form.type == "structural_tag":
        return GuidedDecoding(structural_tag=_tag(form))
    where = "response_format.json_schema"
    named = form.json_schema
    if not isinstance(named, dict):
        raise InvalidArgument(f"{MALFORMED}missing field `json_schema`", param=where)
    for field in ("name", "schema"):
        if field not in named:
            raise InvalidArgument(f"{MALFORMED}missing field `{field}`", param=f"{where}.{field}")
    if not isinstance(named["name"], str):
        raise InvalidArgument(f"{MALFORMED}{where}.name must be a string", param=f"{where}.name")
    schema = named["schema"]
    if schema is None:
        _refuse(f"`{where}.schema` is required when `response_format.type` is `json_schema`", f"{where}.schema")
    if not isinstance(schema, dict):
        _refuse(f"`{where}.schema` must be a JSON object, got {_kind(schema)}", f"{where}.schema")
    check_schema(schema, f"{where}.schema")
    return GuidedDecoding(json=schema)


def _tag(form: Any) -> dict[str, Any]:
    """Return a structural tag from its current or its previous form."""
    if form.format is not None:
        if not isinstance(form.format, dict):
            _refuse("`response_format.format` must be a JSON object", "response_format.format")
        tag = {"type": "structural_tag", "format": form.format}
    elif isinstance(form.structures, list) and isinstance(form.triggers, list):
        tag = {"type": "structural_tag", "structures": form.structures, "triggers": form.triggers}
    else:
        _refuse("`response_format` needs a `format`, or `structures` and `triggers`", "response_format")
    _check_size(tag, "response_format")
    return tag


def _json(schema: Any) -> Any:
    if isinstance(schema, str):
        try:
            read = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            _refuse(f"guided_json is not valid JSON: {error}", "guided_json")
        check_schema(read, "guided_json")
    else:
        check_schema(schema, "guided_json")
    return schema


def _regex(pattern: str) -> str:
    _check_pattern(pattern, "guided_regex")
    return pattern


def _choice(choices: list[str]) -> list[str]:
    if len(choices) > CHOICES_MAX:
        _refuse(f"guided_choice has {len(choices)} members; at most {CHOICES_MAX} are allowed", "guided_choice")
    _check_length(sum(map(len, choices)), "guided_choice")
    return choices


def _grammar(grammar: str) -> str:
    if not grammar.strip():
        _refuse("guided_grammar is empty", "guided_grammar")
    _check_length(len(grammar), "guided_grammar")
    return grammar


CHECKS: Mapping[str, Callable[[Any], Any]] = {"json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar}


# ---- tool calls ------------------------------------------------------------------------------------------------------


def _forced_call(request: ChatCompletionRequest, config: RuntimeConfig) -> GuidedDecoding:
    name = chosen_tool(request.tool_choice)
    functions = [tool["function"] for tool in request.tools or ()]
    numbered = [(number, one) for number, one in enumerate(functions) if name is None or one["name"] == name]
    if name is not None:
        numbered = numbered[:1]
    for number, function in numbered:
        if isinstance(function.get("parameters"), dict):
            check_schema(function["parameters"], f"tools[{number}].function.parameters")
    chosen = [function for _, function in numbered]
    policy = TagPolicy.on(config)
    if policy is not None:
        tag = structural_tag(
            config.tool_call_parser,
            AllowedCalls(
                tools=_tagged(chosen, policy),
                is_needed=True,
                is_single=request.parallel_tool_calls is False,
                is_named=name is not None,
            ),
        )
        if tag is not None:
            return GuidedDecoding(structural_tag=tag)
    if name is not None:
        return GuidedDecoding(json=_parameters(chosen[0]))
    return GuidedDecoding(json=calls_schema(chosen, is_single=request.parallel_tool_calls is False))


def _free_calls(request: ChatCompletionRequest, config: RuntimeConfig) -> GuidedDecoding | None:
    """Return the constraint of optional calls, which must fit the schemas where they occur."""
    policy = TagPolicy.on(config)
    if policy is None:
        return None
    functions = [tool["function"] for tool in request.tools or ()]
    is_wanted = (
        policy.scope == "always"
        or request.parallel_tool_calls is False
        or any(function.get("strict") is True for function in functions)
    )
    if not is_wanted:
        return None
    for number, function in enumerate(functions):
        if isinstance(function.get("parameters"), dict):
            check_schema(function["parameters"], f"tools[{number}].function.parameters")
    is_single = request.parallel_tool_calls is False
    calls = AllowedCalls(tools=_tagged(functions, policy), is_needed=False, is_single=is_single)
    tag = structural_tag(config.tool_call_parser, calls)
    return None if tag is None else GuidedDecoding(structural_tag=tag)


def _tagged(functions: Sequence[Mapping[str, Any]], policy: TagPolicy) -> list[TaggedTool]:
    """Return the tools with their tags; `strict: false` lifts a tool's schema unless the policy requires it."""
    tagged = []
    for function in functions:
        parameters = function.get("parameters")
        is_held = policy.schema == "strict" or function.get("strict") is not False
        tagged.append(TaggedTool(function["name"], parameters if is_held and parameters is not None else True))
    return tagged


def _parameters(function: Mapping[str, Any]) -> Any:
    parameters = function.get("parameters")
    return dict(NO_ARGUMENTS) if parameters is None else parameters


def calls_schema(functions: Sequence[Mapping[str, Any]], *, is_single: bool) -> dict[str, Any]:
    """Return the schema of a non-empty list of calls. Definitions move to the root, where references resolve."""
    definitions: dict[str, Any] = {}
    ways = []
    for number, function in enumerate(functions):
        parameters = _parameters(function)
        if "$defs" in parameters:
            for name, one in parameters["$defs"].items():
                if definitions.setdefault(name, one) != one:
                    where = f"tools[{number}].function.parameters"
                    _refuse(f"{where}: `$defs.{name}` differs from that of another tool", f"{where}.$defs.{name}")
            parameters = {key: value for key, value in parameters.items() if key != "$defs"}
        ways.append(
            {
                "properties": {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters},
                "required": ["name", "parameters"],
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": ways}}
    if is_single:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema


# ---- constraints that no engine accepts ------------------------------------------------------------------------------


def check_schema(schema: Any, where: str) -> None:
    """Raise `InvalidArgument` with the location if a value is not a JSON schema or is too large."""
    _check_size(schema, where)
    waiting: list[tuple[Any, str, int]] = [(schema, "", 0)]
    checked = 0
    while waiting:
        one, path, depth = waiting.pop()
        checked += 1
        if checked > SCHEMAS_MAX:
            _refuse(f"{where} has more than {SCHEMAS_MAX} schemas in it", where)
        if isinstance(one, bool):
            continue
        if not isinstance(one, dict):
            _refuse(f"{where}{path} must be a JSON schema, got {_kind(one)}", where)
        if depth > DEPTH_MAX:
            _refuse(f"{where}{path[:80]} is nested more than {DEPTH_MAX} deep", where)
        fault = _fault(one, schema)
        if fault is not None:
            _refuse(f"{where}{path}{fault}", where)
        waiting += ((inner, path + step, depth + 1) for inner, step in _inner(one))


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield the schemas directly within a schema, with the path to each."""
    for key in SCHEMA_MAPS:
        for name, one in schema.get(key, {}).items():
            yield one, f".{key}.{name}"
    for key in SCHEMA_LISTS:
        for number, one in enumerate(schema.get(key, ())):
            yield one, f".{key}[{number}]"
    for key in SCHEMAS:
        one = schema.get(key)
        if isinstance(one, list) and key == "items":
            yield from ((each, f".{key}[{number}]") for number, each in enumerate(one))
        elif one is not None:
            yield one, f".{key}"


def _fault(schema: Mapping[str, Any], whole: Any) -> str | None:
    """Return the error in the keywords of one schema, if any."""
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [] if kind is None else [kind]
    for one in kinds:
        if not isinstance(one, str) or one not in TYPES:
            return f".type: {str(one)[:80]!r} is not a JSON type"
    for key in SCHEMA_MAPS:
        if not isinstance(schema.get(key, {}), dict):
            return f".{key} must be an object"
    for key in SCHEMA_LISTS:
        if key in schema and (not isinstance(schema[key], list) or not schema[key]):
            return f".{key} must be a non-empty list"
    if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
        return ".enum must be a non-empty list"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        return ".required must be a list of strings"
    for key in COUNTS:
        value = schema.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            return f".{key} must be a number of at least 0"
    if not isinstance(schema.get("pattern", ""), str):
        return ".pattern must be a string"
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str):
        return ".$ref must be a string"
    if reference.startswith("#/") and not _resolves(whole, reference[2:]):
        return f".$ref: {reference[:80]!r} does not exist"
    return None


def _resolves(whole: Any, pointer: str) -> bool:
    at = whole
    for step in pointer.split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list) and name.isdecimal() and int(name) < len(at):
            at = at[int(name)]
        elif isinstance(at, dict) and name in at:
            at = at[name]
        else:
            return "%" in pointer  # Percent-encoded pointers are left to the engine.
    return True


def _bytes_of(value: Any) -> int:
    """Return the size of a value as JSON; more than the maximum if it is nested too deeply to be encoded."""
    try:
        return len(msgspec.json.encode(value))
    except RecursionError:
        return SCHEMA_BYTES_MAX + 1


def _check_size(value: Any, where: str) -> None:
    size = _bytes_of(value)
    if size > SCHEMA_BYTES_MAX:
        _refuse(f"{where} has {size} bytes; at most {SCHEMA_BYTES_MAX} are allowed", where)


def _check_length(chars: int, where: str) -> None:
    if chars > TEXT_CHARS_MAX:
        _refuse(f"{where} has {chars} characters; at most {TEXT_CHARS_MAX} are allowed", where)


def _check_pattern(pattern: str, where: str) -> None:
    """Raise `InvalidArgument` for text that is not a regular expression in any dialect."""
    _check_length(len(pattern), where)
    fault = _unbalanced(pattern)
    if fault is not None:
        _refuse(f"{where}: {fault}", where)


def _unbalanced(pattern: str) -> str | None:
    open_at: list[int] = []
    at, size = 0, len(pattern)
    while at < size:
        char = pattern[at]
        if char == "\\":
            if at + 1 == size:
                return "it ends with a backslash"
            at += 1
        elif char == "[":
            end = _class_end(pattern, at)
            if end is None:
                return f"the bracket at {at} is never closed"
            at = end
        elif char == "(":
            open_at.append(at)
        elif char == ")":
            if not open_at:
                return f"the parenthesis at {at} was never opened"
            open_at.pop()
        at += 1
    return f"the parenthesis at {open_at[-1]} is never closed" if open_at else None


def _class_end(pattern: str, start: int) -> int | None:
    """Return the end of a character class. A bracket right after its start is a member."""
    at = start + 1
    at += pattern.startswith("^", at)
    at += pattern.startswith("]", at)
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "]":
            return at
        at += 1
    return None


def _refuse(message: str, param: str) -> NoReturn:
    raise InvalidArgument(f"{INVALID}{message}", param=param)


def _kind(value: Any) -> str:
    """Return the JSON name of a value's type."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "object")
