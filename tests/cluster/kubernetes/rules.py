"""CEL rules of schemas (x-kubernetes-validations), evaluated with cel-python."""

import functools
import itertools
import re
import warnings
from collections.abc import Iterator
from typing import Any

from tests.cluster.kubernetes.errors import Object, cause, invalid_value, required
from tests.cluster.kubernetes.schema import ANY, Rule, Schema

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import celpy
    from celpy import celtypes
    from celpy.evaluation import CELEvalError

RESERVED = {"true", "false", "null", "in", "as", "break", "const", "continue", "else", "for", "function", "if", "import",
            "let", "loop", "package", "namespace", "return", "var", "void", "while"}  # fmt: skip
ESCAPES = {"__": "__underscores__", ".": "__dot__", "-": "__dash__", "/": "__slash__"}
QUANTITY = re.compile(r"([+-]?[0-9.]+)([eE][+-]?\d+|[numkMGTPE]|[KMGTPE]i)?")
SCALES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, **{s: 1000.0**i for i, s in enumerate("kMGTPE", 1)},
          **{f"{s}i": 1024.0**i for i, s in enumerate("KMGTPE", 1)}}  # fmt: skip


def escaped(name: str) -> str:
    """Return a property name as rules refer to it."""
    if name in RESERVED:
        return f"__{name}__"
    for text, replacement in ESCAPES.items():
        name = name.replace(text, replacement)
    return name


def to_cel(value: Any, schema: Schema) -> Any:
    """Return a JSON value as the CEL value of its schema."""
    if isinstance(value, dict):
        return celtypes.MapType({
            celtypes.StringType(escaped(name) if name in schema.properties else name): to_cel(one, schema.child(name) or ANY)
            for name, one in value.items()
        })  # fmt: skip
    if isinstance(value, list):
        return celtypes.ListType([to_cel(one, schema.items or ANY) for one in value])
    if schema.type == "number" and isinstance(value, int | float):
        return celtypes.DoubleType(value)
    if isinstance(value, str) and schema.raw.get("format") == "date-time":
        return celtypes.TimestampType(value)
    if isinstance(value, str) and schema.raw.get("format") == "duration":
        return celtypes.DurationType(value)
    return celpy.json_to_cel(value)


def _quantity(text: str) -> float:
    found = QUANTITY.fullmatch(text)
    if not found:
        raise CELEvalError(f"quantity({text!r})")
    unit = found[2] or ""
    return float(found[1]) * (SCALES[unit] if unit in SCALES else float(f"1{unit}") if unit else 1.0)


def _join(items: Any, separator: Any = "") -> Any:
    return celtypes.StringType(str(separator).join(str(one) for one in items))


FUNCTIONS = {
    "quantity": lambda text: celtypes.DoubleType(_quantity(str(text))),
    "isQuantity": lambda text: celtypes.BoolType(bool(QUANTITY.fullmatch(str(text)))),
    "compareTo": lambda left, right: celtypes.IntType((left > right) - (left < right)),
    "isGreaterThan": lambda left, right: celtypes.BoolType(left > right),
    "isLessThan": lambda left, right: celtypes.BoolType(left < right),
    "isSorted": lambda items: celtypes.BoolType(all(a <= b for a, b in itertools.pairwise(items))),
    "sum": lambda items: functools.reduce(lambda a, b: a + b, items),
    "min": min,
    "max": max,
    "indexOf": lambda items, one: celtypes.IntType(items.find(one) if isinstance(items, str) else items.index(one) if one in items else -1),
    "join": _join,
    "lowerAscii": lambda text: celtypes.StringType(str(text).lower()),
    "upperAscii": lambda text: celtypes.StringType(str(text).upper()),
    "trim": lambda text: celtypes.StringType(str(text).strip()),
    "replace": lambda text, old, new: celtypes.StringType(str(text).replace(old, new)),
    "split": lambda text, separator: celtypes.ListType([celtypes.StringType(one) for one in str(text).split(separator)]),
    "substring": lambda text, start, end=None: celtypes.StringType(str(text)[int(start):None if end is None else int(end)]),
    "find": lambda text, pattern: celtypes.StringType((re.search(str(pattern), str(text)) or [""])[0]),
}  # fmt: skip


@functools.cache
def _program(rule: str) -> Any:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule), FUNCTIONS)


def is_transition(rule: str) -> bool:
    return bool(re.search(r"\boldSelf\b", rule))


def check_rules(raw: Object, path: str) -> list[Object]:
    """Return the rules that do not compile."""
    causes = []
    for index, one in enumerate(raw["x-kubernetes-validations"]):
        at = f"{path}.x-kubernetes-validations[{index}]"
        if not str(one.get("rule") or "").strip():
            causes.append(required(f"{at}.rule", "rule is not specified"))
            continue
        if one.get("optionalOldSelf"):
            causes.append(
                cause(
                    "FieldValueForbidden",
                    "Forbidden: this test server does not evaluate optionalOldSelf",
                    f"{at}.optionalOldSelf",
                )
            )
        try:
            _program(one["rule"])
        except celpy.CELParseError as error:
            causes.append(invalid_value(f"{at}.rule", one["rule"], f"compilation failed: {error}"))
    return causes


def rules_of(schema: Schema) -> Rule:
    """Return the evaluation of the rules of a schema node."""
    rules: list[Object] = schema.raw["x-kubernetes-validations"]

    def evaluate(node: Schema, value: Any, old: Any, path: str) -> Iterator[Object]:
        variables = {"self": to_cel(value, node)}
        if old is not None:
            variables["oldSelf"] = to_cel(old, node)
        for one in rules:
            if old is None and is_transition(one["rule"]):
                continue
            try:
                passed = bool(_program(one["rule"]).evaluate(variables))
                text = one.get("message") or f"failed rule: {one['rule'].strip()}"
                if not passed and one.get("messageExpression"):
                    text = str(_program(one["messageExpression"]).evaluate(variables))
            except CELEvalError as error:
                passed, text = False, f"rule evaluation error: {error}: {one['rule']}"
            if not passed:
                at = path + (one.get("fieldPath") or "")
                kind = node.type or "object"
                reason = one.get("reason") or "FieldValueInvalid"
                if reason == "FieldValueInvalid":
                    yield cause(reason, f'Invalid value: "{kind}": {text}', at)
                else:
                    prefix = {
                        "FieldValueForbidden": "Forbidden",
                        "FieldValueRequired": "Required value",
                        "FieldValueDuplicate": "Duplicate value",
                    }[reason]
                    yield cause(reason, f"{prefix}: {text}", at)

    return evaluate
