"""Write the flags of every command into docs/reference/flags.md, from the configurations that declare them."""

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from typing import Any

from tools.pages import REFERENCE, cell, code, table, write

from dynamo.frontend.config import UNSUPPORTED_FLAGS

PAGE = REFERENCE / "flags.md"
COMMANDS = {
    "dynamo serve": "dynamo.cli.options:ServeConfig",
    "dynamo chat": "dynamo.cli.chat:ChatConfig",
    "dynamo route explain": "dynamo.cli.route:ExplainConfig",
    "dynamo route state": "dynamo.cli.route:StateConfig",
    "dynamo top": "dynamo.cli.top:TopConfig",
    "dynamo plan explain": "dynamo.cli.plan:PlanExplainConfig",
    "dynamo plan replay": "dynamo.cli.plan:PlanReplayConfig",
    "dynamo replay": "dynamo.replay.config:ReplayConfig",
    "dynamo replay sweep": "dynamo.replay.sweep:SweepConfig",
    "dynamo replay fit": "dynamo.replay.fit:FitConfig",
    "dynamo replay convert": "dynamo.replay.convert:ConvertConfig",
    "dynamo replay datagen analyze": "dynamo.replay.datagen:AnalyzeConfig",
    "dynamo replay datagen synthesize": "dynamo.replay.datagen:SynthesizeConfig",
    "dynamo replay sin_synth": "dynamo.replay.sin_synth:SinConfig",
    "python -m dynamo.frontend": "dynamo.frontend.config:FrontendConfig",
    "python -m dynamo.cpu": "dynamo.cpu.config:CpuConfig",
    "python -m dynamo.mocker": "dynamo.mocker.config:MockerConfig",
    "python -m dynamo.vllm": "dynamo.vllm.config:VllmConfig",
    "python -m dynamo.sglang": "dynamo.sglang.config:SglangConfig",
    "python -m dynamo.trtllm": "dynamo.trtllm.config:TrtllmConfig",
    "python -m dynamo.openai_proxy": "dynamo.openai_proxy.config:ProxyConfig",
    "python -m dynamo.router": "dynamo.router.main:RouterOptions",
    "python -m dynamo.global_planner": "dynamo.global_planner.main:GlobalPlannerOptions",
    "python -m dynamo.global_router": "dynamo.global_router.main:GlobalRouterOptions",
    "python -m dynamo.indexer": "dynamo.indexer.main:IndexerOptions",
    "python -m dynamo.slot_tracker": "dynamo.slot_tracker.main:SlotTrackerOptions",
    "python -m dynamo.select_service": "dynamo.select_service.main:SelectOptions",
}
HEAD = """# Flags

The flags of every command, with their environment variables and defaults. A flag overrides its variable. Boolean flags also have a
form with `--no-`. `COMMAND --help` describes the common flags, `--help-all` all of them. Written by `tools/flags_page.py`;
`make references` updates it.

`dynamo serve` also takes the flags of the frontend and of the chosen engine. The workers of vLLM, SGLang and TensorRT-LLM also take
the engine's own arguments.

## Commands

"""


def main() -> int:
    """Rewrite the page."""
    return write(PAGE, content())


def configurations() -> dict[str, type[Any]]:
    """Return the configuration of each command."""
    found = {}
    for command, place in COMMANDS.items():
        module, _, name = place.partition(":")
        found[command] = getattr(import_module(module), name)
    return found


def content() -> str:
    """Return the page: the groups of each command, then the flags of each group."""
    groups: dict[type[Any], dict[str, Any]] = {}
    rows = []
    for command, config in configurations().items():
        owners = {}
        for owner, field in options(config):
            groups.setdefault(owner, {})[field.name] = field
            owners[owner] = f"[{title(owner)}](#{anchor(owner)})"
        rows.append((code(command), ", ".join(owners.values())))
    parts = [HEAD + table(("command", "groups of flags"), rows), unsupported()]
    parts += [f"## {title(owner)}\n\n{flags(found.values())}" for owner, found in groups.items()]
    return "\n".join(parts)


def options(config: type[Any]) -> Iterator[tuple[type[Any], Any]]:
    """Yield the options of a configuration, each with the class that declares it."""
    for field in fields(config):
        if "flag" in field.metadata:
            yield next(base for base in config.__mro__ if field.name in inspect.get_annotations(base)), field


def title(owner: type[Any]) -> str:
    """Return the first sentence of a class's docstring without its details."""
    first = (owner.__doc__ or owner.__name__).strip().splitlines()[0]
    return cell(re.split(r"[:,;.](?: |$)", first)[0])


def anchor(owner: type[Any]) -> str:
    return "".join(letter for letter in title(owner).lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


def flags(found: Any) -> str:
    """Return the table of a group's flags."""
    return table(("flag", "variable", "default", ""), [line(field) for field in found])


def line(field: Any) -> tuple[str, str, str, str]:
    """Return the cells of one flag."""
    metadata = field.metadata
    names = ", ".join(code(name) for name in (metadata["flag"], *metadata["aliases"]))
    choices = f" ({', '.join(metadata['choices'])})" if metadata["choices"] else ""
    return names, code(metadata["env"] or ""), default(field), cell(metadata["help"] + choices)


def default(field: Any) -> str:
    """Return the default as text; empty if there is none, or if it depends on the environment."""
    value = field.default
    if callable(field.default_factory):
        made = field.default_factory.__name__ == "<lambda>" and field.default_factory()
        return code(",".join(map(str, made))) if isinstance(made, list) else ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return code(f"{value}") if isinstance(value, str | int | float) else ""


def unsupported() -> str:
    """Return the sentence about upstream's flags that the frontend refuses."""
    names = ", ".join(code(one.flag) for one in UNSUPPORTED_FLAGS if one.flag.startswith("--"))
    return (
        f"The frontend recognizes these flags of upstream and refuses other values than upstream's default: {names}.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
