"""Request fields: writes the tables of docs/request-fields.md, between its markers, from `dynamo.protocols.field_effects`."""

import sys
from pathlib import Path

import msgspec

from dynamo.protocols.field_effects import ENDPOINTS, Effect, effect_of, types_within

PAGE = Path(__file__).resolve().parent.parent / "docs" / "request-fields.md"
BEGIN, END = "<!-- fields: written by tools/request_fields.py -->", "<!-- end of fields -->"


def main() -> int:
    """Rewrites the page; status 1 with `--check` when it was out of date."""
    before = PAGE.read_text(encoding="utf-8")
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    after = f"{head}{BEGIN}\n\n{tables()}\n{END}{tail}"
    if "--check" in sys.argv[1:]:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


def tables() -> str:
    """A section for each route, and one for the objects that requests hold."""
    parts: list[str] = []
    inner: dict[type[msgspec.Struct], None] = {}
    for route, kind in ENDPOINTS.items():
        parts.append(f"### `{route}`\n\n{table(kind)}")
        inner.update(dict.fromkeys(one for one in types_within(kind) if one not in ENDPOINTS.values()))
    parts.append("## Objects within requests\n")
    for kind in inner:
        family = kind.__module__.rpartition(".")[2]
        parts.append(f"### {kind.__name__} ({family})\n\n{table(kind)}")
    return "\n".join(parts)


def table(kind: type[msgspec.Struct]) -> str:
    """The fields by what becomes of them."""
    shown = [(field.encode_name, effect_of(kind, field.name)) for field in msgspec.structs.fields(kind)]
    honoured = ", ".join(f"`{name}`" for name, one in shown if one.effect is Effect.HONOURED and not one.note)
    lines = [f"Honoured: {honoured}.\n"] if honoured else []
    others = [(name, one) for name, one in shown if one.effect is not Effect.HONOURED or one.note]
    if others:
        lines += ["| field | effect |", "|---|---|"]
        lines += [f"| `{name}` | {text(one.effect, one.note)} |" for name, one in others]
        lines.append("")
    return "\n".join(lines)


def text(effect: Effect, note: str) -> str:
    return f"{effect.value} ({note})" if note else effect.value


if __name__ == "__main__":
    sys.exit(main())
