"""Write docs/reference/python-api.md: the public Python API of the released 1.6.1, each name with its status here.

The released API is in tests/conformance/python_api.json; `--released PYTHON` writes that file first, with the interpreter
in which the released package is installed. Reasons of differences are in tests/conformance/python_api_reasons.json: a
pattern of `module.name` or `module.name.member`, and why it differs. Every difference needs one; those that apply to no
difference any more are removed.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tools.pages import REFERENCE, ROOT, cell, code, table, write

PAGE = REFERENCE / "python-api.md"
RELEASED = ROOT / "tests" / "conformance" / "python_api.json"
REASONS = ROOT / "tests" / "conformance" / "python_api_reasons.json"
DUMP = ROOT / "tools" / "python_api_dump.py"
DUMP_TIMEOUT_S = 300.0
UNSTATED = "..."
"""Parameters or a default that an extension module does not state."""
HEAD = """# Python API compared with 1.6.1

Every public name of the released package's `dynamo._core`, `dynamo.llm`, `dynamo.runtime`, `dynamo.common`, `dynamo.nixl_connect`,
`dynamo.logits_processing`, `dynamo.health_check`, `dynamo.prometheus_names` and `dynamo.router.args`. A name is *same* if a program
finds it at the same address, of the same kind, with the same parameters, defaults and members; additional names, members and optional
parameters are allowed. Types are not compared. [Python API](../python-api.md) describes their use. Written by `tools/python_api.py`;
`make references` updates it.

"""


OPTIONAL = ("dynamo.nixl_connect.nixl_api", "dynamo.nixl_connect.nixl_bindings")
"""Names of an optional package; the page must not depend on whether it is installed."""


class Difference(NamedTuple):
    """One difference: `module.name` or `module.name.member`, and what differs."""

    address: str
    text: str


def main() -> int:
    """Rewrite the page; with `--released PYTHON` the released API too."""
    if "--released" in sys.argv:
        RELEASED.write_text(dumped(sys.argv[sys.argv.index("--released") + 1]), encoding="utf-8")
    for difference in unexplained():
        print(f"no reason for {difference.address}: {difference.text}", file=sys.stderr)
    used = {pattern: text for pattern, text in reasons().items() if pattern not in unused_patterns()}
    return write(REASONS, json.dumps(used, indent=1) + "\n") | write(PAGE, content())


def content() -> str:
    """Return the page: counts, then the table of each module."""
    counts, sections = Counter[str](), []
    for module, names in released().items():
        rows = []
        for name, api in names.items():
            found = compared(module, name)
            counts["differs" if found else "same"] += 1
            rows.append((code(name), code(signature(name, api)), "; ".join(map(status, found)) or "same"))
        if rows:
            sections.append(f"## {module}\n\n{table(('name', 'signature', 'status'), rows)}")
    total = f"{counts['same']} names are the same; {counts['differs']} differ.\n"
    return "\n".join([HEAD + total, *sections])


def status(difference: Difference) -> str:
    """Return a difference and its reason as text of a cell."""
    return cell(f"{difference.text} ({reason(difference.address) or 'no reason given'})")


def signature(name: str, api: dict[str, Any]) -> str:
    """Return a name with the parameters of its call; the bare name if it has none that are known."""
    listed = api.get("parameters")
    return f"{name}({', '.join(listed)})" if listed and listed != [UNSTATED] else ""


# Facts


@cache
def released() -> dict[str, dict[str, Any]]:
    """Return the public names of each module of the released package."""
    found: dict[str, dict[str, Any]] = json.loads(RELEASED.read_text(encoding="utf-8"))
    return found


@cache
def ours() -> dict[str, dict[str, Any] | None]:
    """Return those names that this package has, found by a process of its own: modules prepare their process."""
    found: dict[str, dict[str, Any] | None] = json.loads(dumped(sys.executable, RELEASED))
    return found


def dumped(python: str, *earlier: Path) -> str:
    """Return the API of the package that an interpreter imports. Raises `CalledProcessError`."""
    with tempfile.TemporaryDirectory() as home:
        out = Path(home, "api.json")
        subprocess.run([python, str(DUMP), str(out), *map(str, earlier)], check=True, timeout=DUMP_TIMEOUT_S, cwd=home)
        return out.read_text(encoding="utf-8")


@cache
def reasons() -> dict[str, str]:
    """Return the reason of each pattern, in the order in which they apply."""
    found: dict[str, str] = json.loads(REASONS.read_text(encoding="utf-8"))
    return found


def pattern_of(address: str) -> str | None:
    """Return the first pattern that applies to an address or to the name that it is a member of."""
    return next((one for one in reasons() if fnmatchcase(address, one) or address.startswith(f"{one}.")), None)


def reason(address: str) -> str | None:
    pattern = pattern_of(address)
    return reasons()[pattern] if pattern else None


# Comparison


def differences() -> list[Difference]:
    """Return every difference."""
    return [one for module, names in released().items() for name in names for one in compared(module, name)]


def unexplained() -> list[Difference]:
    """Return the differences without a reason."""
    return [one for one in differences() if pattern_of(one.address) is None]


def unused_patterns() -> list[str]:
    """Return the patterns of reasons that apply to no difference."""
    used = {pattern_of(one.address) for one in differences()}
    return [pattern for pattern in reasons() if pattern not in used]


def compared(module: str, name: str) -> list[Difference]:
    """Return the differences of one name."""
    address, names = f"{module}.{name}", ours().get(module)
    if names is None:
        return [Difference(address, "missing module")]
    if address in OPTIONAL:
        return [Difference(address, "there if its package is installed")]
    if name not in names:
        return [Difference(address, "missing")]
    return list(of_name(address, released()[module][name], names[name]))


def of_name(address: str, theirs: dict[str, Any], mine: dict[str, Any]) -> Iterator[Difference]:
    """Yield the differences of a name that both packages have."""
    if theirs["kind"] != mine["kind"] and not (theirs["kind"] == "function" and mine["kind"] == "class"):
        yield Difference(address, f"a {mine['kind']} instead of a {theirs['kind']}")
        return
    for text in of_parameters(theirs.get("parameters"), mine.get("parameters")):
        yield Difference(address, text)
    for base in theirs.get("bases", ()):
        if base not in mine.get("bases", ()):
            yield Difference(address, f"no subclass of `{base}`")
    members = mine.get("members", {})
    for member, parameters in theirs.get("members", {}).items():
        if member not in members and member not in mine.get("assigned", ()):
            yield Difference(f"{address}.{member}", f"`{member}` missing")
        elif parameters is not None and members.get(member) is None:
            yield Difference(f"{address}.{member}", f"`{member}` is no method")
        else:
            for text in of_parameters(parameters, members.get(member)):
                yield Difference(f"{address}.{member}", f"`{member}`: {text}")


def of_parameters(theirs: Sequence[str] | None, mine: Sequence[str] | None) -> Iterator[str]:
    """Yield what a call that the released function accepts would meet here: names, order and defaults."""
    if theirs is None or mine is None or list(theirs) == [UNSTATED] or list(mine) == [UNSTATED]:
        return
    here = arguments(mine)
    for name, (place, default) in arguments(theirs).items():
        if name not in here:
            yield f"parameter `{name}` missing"
            continue
        own_place, own_default = here.pop(name)
        if place is not None and own_place != place:
            yield f"parameter `{name}` at another position"
        if default not in {None, own_default} and (own_default is None or UNSTATED not in {default, own_default}):
            yield f"`{name}` {spoken(own_default)} instead of {spoken(default)}"
    for name, (_, default) in here.items():
        if default is None and not name.startswith("*"):
            yield f"additional required parameter `{name}`"


def arguments(parameters: Sequence[str]) -> dict[str, tuple[int | None, str | None]]:
    """Return position (None for keyword-only) and default (None for required) of each parameter."""
    found: dict[str, tuple[int | None, str | None]] = {}
    positional = True
    for place, parameter in enumerate(parameters):
        name, _, default = parameter.partition("=")
        if name.startswith("*"):
            positional = positional and name.startswith("**")
        if name != "*":
            found[name] = (place if positional else None, default or None)
    return found


def spoken(default: str | None) -> str:
    """Return a default as text."""
    return "required" if default is None else f"`{default}`"


if __name__ == "__main__":
    sys.exit(main())
