"""Parse flags and variables with the configuration classes of the installed `dynamo`: `peer_config_classes.py < CASES`.

Runs with the released package and with ours, so it imports nothing of this repository. Without cases on standard input it
prints the flags of each group as JSON; a case is a group, variables and arguments, and its result the configuration.
"""

import argparse
import contextlib
import importlib
import io
import json
import logging
import os
import re
import sys
import warnings
from typing import Any

GROUPS = "dynamo.common.configuration.groups."
CLASSES = {
    "runtime": (f"{GROUPS}runtime_args", "DynamoRuntimeArgGroup", "DynamoRuntimeConfig"),
    "kv_router": (f"{GROUPS}kv_router_args", "KvRouterArgGroup", "KvRouterConfigBase"),
    "worker_router": (f"{GROUPS}router_args", "RouterArgGroup", "RouterConfigBase"),
    "ais": (f"{GROUPS}ais_perf_args", "AisPerfArgGroup", "AisPerfConfigBase"),
    "http": (f"{GROUPS}http_args", "HttpArgGroup", "HttpConfigBase"),
    "frontend": ("dynamo.frontend.frontend_args", "FrontendArgGroup", "FrontendConfig"),
    "router": ("dynamo.router.args", "DynamoRouterArgGroup", "DynamoRouterConfig"),
}
OPTIONS = {"worker_router": {"default_router_mode": "round-robin", "include_frontend_only": True}}
"""Arguments of a group's class."""
VARIABLES = dict(os.environ)


def main() -> None:
    """Print the flags of each group, or the results of the cases."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    text = sys.stdin.read()
    found: Any = [result(*case) for case in json.loads(text)] if text else {name: flags(name) for name in CLASSES}
    print(json.dumps(found))


def made(group: str, name: str) -> Any:
    """Return a class of a group, by its position in `CLASSES`."""
    return getattr(importlib.import_module(CLASSES[group][0]), name)


def parser(group: str) -> argparse.ArgumentParser:
    """Return a parser with the flags of a group, whose defaults are the variables."""
    parsed = argparse.ArgumentParser()
    made(group, CLASSES[group][1])(**OPTIONS.get(group, {})).add_arguments(parsed)
    return parsed


def flags(group: str) -> list[dict[str, Any]]:
    """Return names, variable and kind of value of each flag. The released help names the variable."""
    return [
        {
            "names": action.option_strings,
            "variable": (re.findall(r"env var: (\w+)", action.help or "") or [None])[0],
            "is_switch": action.nargs == 0 or "--no-" in " ".join(action.option_strings),
            "choices": list(map(str, action.choices or ())),
            "type": getattr(action.type, "__name__", ""),
        }
        for action in parser(group)._actions
        if action.dest != "help"
    ]


def result(group: str, variables: dict[str, str], arguments: list[str]) -> dict[str, Any]:
    """Return the attributes of the configuration, or the names of the error's classes."""
    os.environ.clear()
    os.environ.update(VARIABLES | variables)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            if group == "http" and not arguments:  # Also variables under their former names.
                config = made(group, "from_env")()
            else:
                config = made(group, CLASSES[group][2]).from_cli_args(parser(group).parse_args(arguments))
        config.validate()
    except (Exception, SystemExit) as error:
        return {"error": [one.__name__ for one in type(error).__mro__]}
    return {name: shown(value) for name, value in vars(config).items() if not name.startswith("_")}


def shown(value: Any) -> Any:
    """Return a value as JSON: classes of objects are not compared."""
    if isinstance(value, list | tuple):
        return [shown(one) for one in value]
    return value if isinstance(value, str | int | float | None) else str(getattr(value, "value", type(value).__name__))


if __name__ == "__main__":
    main()
