"""Router settings have the same names, defaults, ranges and errors on each surface as in the recorded snapshot.

`python -m tests.contract.test_router_settings` writes the snapshot after an intended change.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import yaml

from dynamo.core.config import ArgumentParser, build_parser, from_namespace
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.core.unsupported_flags import load as load_with_unsupported
from dynamo.frontend.config import FrontendConfig
from dynamo.kv_router.config import CostWeights, RoutingConfig
from dynamo.llm import KvRouterConfig, RouterConfig
from dynamo.mocker.config import UNSUPPORTED_FLAGS, MockerConfig
from dynamo.protocols.model_card import ModelDeploymentCard
from dynamo.replay.router_settings import NAMES, router_settings
from dynamo.router.main import UNSUPPORTED, RouterOptions
from dynamo.routing.python_config import wanted_routing
from dynamo.runtime.config import RuntimeOptions
from dynamo.runtime.push_router import RouterMode
from dynamo.select_service.main import SelectOptions

C = TypeVar("C")

SNAPSHOT = Path(__file__).with_name("router_settings.json")
ENDPOINT = "--endpoint=a.b.c"
WORDS = ("x", "wspt", "lru", "hicache", "ais", "keyed-xxh3-v1", "balanced")


def samples(default: Any) -> tuple[Any, ...]:
    """Return values of the default's type and of others."""
    if isinstance(default, bool):
        return (True, False)
    return (True, False, *WORDS) if isinstance(default, str) else (True, False, 0, 0.5, 2, -1, float("inf"), "x")


@functools.cache
def parser(config_type: type[Any]) -> ArgumentParser:
    """Return the command-line parser of a configuration, without environment variables."""
    return build_parser(config_type, variables={})


def load(config_type: type[C], argv: Sequence[str]) -> C:
    """Return a configuration from a command line."""
    return from_namespace(config_type, parser(config_type).parse_args(list(argv)))  # type: ignore[arg-type]


def diff(value: Any, default: Any) -> dict[str, Any]:
    """Return the fields in which two structures differ."""
    given, plain = msgspec.to_builtins(value), msgspec.to_builtins(default)
    changed = {name: given[name] for name in given if given[name] != plain.get(name)}
    if isinstance(changed.get("weights"), dict) and isinstance(plain.get("weights"), dict):
        changed["weights"] = diff(changed["weights"], plain["weights"])
    return changed


def outcome(action: Callable[[], Any]) -> Any:
    """Return the result, or the error's text."""
    try:
        return action()
    except (ConfigError, InvalidArgument, ValueError, TypeError) as error:
        if isinstance(error, TypeError):
            return "TypeError"
        text = str(error).partition(" (see ")[0]  # Without the name of the program.
        return f"{type(error).__name__}: {text}".replace("__init__() ", "")


def flags(config_type: type[Any]) -> dict[str, Any]:
    """Return alias, variable, default, choices and type of each flag."""
    found = {}
    for one in dataclasses.fields(config_type):
        if "flag" in one.metadata and one.metadata["flag"] in ROUTING_FLAGS:
            default = one.default if one.default is not dataclasses.MISSING else "factory"
            meta = one.metadata
            found[meta["flag"]] = [
                list(meta["aliases"]),
                meta["env"],
                default,
                list(meta["choices"] or []),
                str(getattr(one.type, "__name__", one.type)).removesuffix(" | None"),
            ]
    return dict(sorted(found.items()))


def names_of(config_type: type[Any]) -> set[str]:
    """Return the flags of a configuration."""
    return {one.metadata["flag"] for one in dataclasses.fields(config_type) if "flag" in one.metadata}


ONLY_OF_FRONTENDS = {
    "--enforce-disagg",
    "--router-conditional-disagg",
    "--router-conditional-disagg-config",
    "--router-prefill-policy",
    "--router-decode-policy",
    "--active-decode-blocks-threshold",
    "--active-prefill-tokens-threshold",
    "--active-prefill-tokens-threshold-frac",
}
ROUTING_FLAGS = (names_of(RouterOptions) - names_of(RuntimeOptions) - {"--endpoint"}) | ONLY_OF_FRONTENDS


def words_of(flag: str, default: Any, hint: str, choices: Sequence[str]) -> Iterator[str]:
    """Return command-line words that set a flag to sample values."""
    if "bool" in hint:
        yield flag
        yield flag.replace("--", "--no-", 1)
    elif choices:
        yield from (f"{flag}={value}" for value in (*choices, "x"))
    else:
        yield from (f"{flag}={value}" for value in (0.5, 2, 0, -1, "x", 40_000_000))


def effect_of_flags(argv: Sequence[str]) -> Any:
    """Return how a router's configuration differs from the default."""
    plain = load(RouterOptions, [ENDPOINT]).meaning()[0]
    return outcome(lambda: diff(load(RouterOptions, [ENDPOINT, *argv]).meaning()[0], plain))


def routing_flags(config_type: type[Any]) -> Iterator[tuple[str, list[str]]]:
    """Return each routing flag with command-line words."""
    for flag, (_, _, default, choices, hint) in flags(config_type).items():
        yield flag, list(words_of(flag, default, hint, choices))


def of_routers() -> dict[str, Any]:
    """Return the effect of each flag of a router."""
    found = {word: effect_of_flags([word]) for _, words in routing_flags(RouterOptions) for word in words}
    for argv in (
        ["--load-aware", "--router-policy=balanced", "--shared-cache-type=hicache", "--use-remote-indexer"],
        ["--load-aware", "--no-router-track-active-blocks", "--router-predicted-ttl-secs=2", "--no-kv-events"],
        ["--router-kv-overlap-score-weight=0", "--use-remote-indexer"],
        ["--router-policy=balanced", "--router-queue-threshold=3", "--router-queue-policy=fcfs"],
        ["--serve-indexer", "--use-remote-indexer"],
        [
            "--router-prefill-load-model=aic",
            '--ais-perf-config={"backend":"b","system":"s","model":"m","worker_type":"w"}',
        ],
        ["--router-prefill-load-model=ais", "--ais-backend=b", "--ais-system=s", "--ais-model-path=m"],
        ["--router-prefill-load-model=ais", "--ais-backend=b", "--ais-perf-config={}"],
        ["--router-tracking-hash=keyed-xxh3-v1", "--router-tracking-key-file=/none", "--router-tracking-key-id=a"],
        ["--router-tracking-hash=keyed-xxh3-v1", "--router-tracking-key-file=/none"],
    ):
        found[" ".join(argv)] = effect_of_flags(argv)
    return found


def of_frontends() -> dict[str, Any]:
    """Return whether a frontend accepts each flag."""
    return {
        " ".join(argv): outcome(lambda argv=argv: load(FrontendConfig, argv) and "accepted")  # type: ignore[misc]
        for flag, words in routing_flags(FrontendConfig)
        if flag in ONLY_OF_FRONTENDS
        for word in words
        for argv in ([word], ["--router-mode=kv", word])
    }


def of_unsupported(config_type: type[Any], table: Any, *first: str) -> dict[str, Any]:
    """Return how a command reacts to the flags that it does not support."""
    declared = flags(config_type)
    found = {}
    for one in sorted(table, key=lambda one: one.flag):
        if one.flag in declared:
            continue
        value = f"{one.flag}={not one.default if isinstance(one.default, bool) else 'x'}"
        for word in (f"{one.flag}={one.default}", value, *(f"{alias}=x" for alias in one.aliases)):
            argv = [*first, word]
            found[word] = outcome(lambda argv=argv: load_with_unsupported(config_type, argv, table) and "accepted")  # type: ignore[misc]
    return found


def of_mockers() -> dict[str, Any]:
    """Return what a mocker publishes for each flag."""
    plain = load(MockerConfig, ["--router-mode=kv"]).routing()
    assert plain is not None

    def published(*argv: str) -> Any:
        routing = load(MockerConfig, argv).routing()
        card = {} if routing is None else routing.on_card()
        return diff(card, plain.on_card()) if card.get("router_mode") == "k_v" else "accepted"

    return {
        " ".join(argv): outcome(lambda argv=argv: published(*argv))  # type: ignore[misc]
        for _, words in routing_flags(MockerConfig)
        for word in words
        for argv in ([word], ["--router-mode=kv", word], ["--router-mode=random", word])
        if argv == ["--router-mode=kv", word] or not word.endswith(("=2", "=0", "=-1", "=40000000"))
    }


def of_python() -> dict[str, Any]:
    """Return the signature, and the effect of each argument."""
    plain = KvRouterConfig().meaning(16)
    plain_card = RouterConfig(RouterMode.KV, KvRouterConfig()).on_card()["kv_router_config"]
    found: dict[str, Any] = {
        "signature": {name: one.default for name, one in sorted(inspect.signature(KvRouterConfig).parameters.items())},
        "card": plain_card,
    }
    for name, one in sorted(inspect.signature(KvRouterConfig).parameters.items()):
        for value in samples(one.default):
            config = outcome(lambda name=name, value=value: KvRouterConfig(**{name: value}))  # type: ignore[misc]
            if isinstance(config, KvRouterConfig):
                config = [
                    outcome(lambda config=config: diff(config.meaning(16), plain)),  # type: ignore[misc]
                    outcome(
                        lambda config=config: diff(  # type: ignore[misc]
                            RouterConfig(RouterMode.KV, config).on_card()["kv_router_config"], plain_card
                        )
                    ),
                ]
            found[f"{name}={value!r}"] = config
    return found


def of_cards() -> dict[str, Any]:
    """Return how each setting of a card is read."""
    found: dict[str, Any] = {}
    names = (*inspect.signature(KvRouterConfig).parameters, "unknown")
    for name in sorted(names):
        for value in (None, True, 2, -1, "x"):
            output = {"router_mode": "k_v", "kv_router_config": {name: value}}
            card = ModelDeploymentCard(display_name="m", slug="m", router_config=output)
            with logged() as lines:
                kv = wanted_routing(card).kv
            shown = None if kv is None else diff(vars(kv), vars(KvRouterConfig()))
            found[f"{name}={value!r}"] = lines or shown
    for name in ("session_affinity_ttl_secs", "session_affinity_mode", "enforce_disagg", "load_threshold_config"):
        for given in (True, 0, 5, "soft", 10**9, {"active_decode_blocks_threshold": 0.5}):
            card = ModelDeploymentCard(display_name="m", slug="m", router_config={"router_mode": "random", name: given})
            with logged() as lines:
                wanted = wanted_routing(card)
            found[f"{name}={given!r}"] = [msgspec.to_builtins(dataclasses.asdict(wanted)), lines]
            if name != "load_threshold_config":
                found[f"RouterConfig {name}={given!r}"] = outcome(
                    lambda name=name, given=given: RouterConfig(RouterMode.KV, **{name: given}).on_card()[name]  # type: ignore[misc]
                )
    return found


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the messages that are logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dynamo.routing")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def of_files() -> dict[str, Any]:
    """Return the effect of each key of a policy file."""
    found: dict[str, Any] = {}
    names = sorted({*inspect.signature(KvRouterConfig).parameters, "unknown"})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy.yaml"

        def effect(content: dict[str, Any]) -> Any:
            path.write_text(yaml.safe_dump(content))
            text = effect_of_flags([f"--router-policy-config={path}"])
            return text.replace(str(path), "FILE") if isinstance(text, str) else text

        for name in names:
            for value in (True, 0.5, -1, *WORDS):
                found[f"router {name}={value!r}"] = effect({"router": {name: value}})
                if is_unknown(found, f"router {name}={value!r}"):
                    break
            for value in (True, 0.5, -1):
                instance = {"name": "i", "type": "default", "parameters": {name: value}}
                selection = {"aggregated": "i", "instances": [instance]}
                found[f"parameters {name}={value!r}"] = effect({"worker_selection": selection})
                if is_unknown(found, f"parameters {name}={value!r}"):
                    break
    return found


def is_unknown(found: dict[str, Any], key: str) -> bool:
    """Return whether the file's key is unknown; the list of known keys is kept once."""
    if "expected one of" not in str(found[key]):
        return False
    found[key], _, known = found[key].partition("expected one of")
    found[f"known {key.partition(' ')[0]}"] = known
    return True


def of_replay() -> dict[str, Any]:
    """Return the settings of `--router-config` of the replay tool."""
    names = {*RoutingConfig.__struct_fields__, *CostWeights.__struct_fields__, "temperature", "router_queue_threshold"}
    names |= {"router_policy", *inspect.signature(KvRouterConfig).parameters}
    plain = router_settings({}, 16).config

    def effect(name: str, value: Any) -> Any:
        found = outcome(lambda: diff(router_settings({name: value}, 16).config, plain))
        return found.replace(", ".join(NAMES), "NAMES") if isinstance(found, str) else found

    return {f"{name}={value!r}": effect(name, value) for name in sorted(names) for value in (True, 0.5, "balanced")}


SURFACES: dict[str, Callable[[], dict[str, Any]]] = {
    "flags of the frontend": lambda: flags(FrontendConfig),
    "flags of the router": lambda: flags(RouterOptions),
    "flags of the selection service": lambda: flags(SelectOptions),
    "flags of the mocker": lambda: flags(MockerConfig),
    "router": of_routers,
    "frontend": of_frontends,
    "mocker": of_mockers,
    "unsupported by the router": lambda: of_unsupported(RouterOptions, UNSUPPORTED, ENDPOINT),
    "unsupported by the mocker": lambda: of_unsupported(MockerConfig, UNSUPPORTED_FLAGS),
    "python": of_python,
    "card": of_cards,
    "policy file": of_files,
    "replay": of_replay,
}


def shown(name: str) -> dict[str, Any]:
    """Return one surface as it is in the snapshot."""
    found: dict[str, Any] = json.loads(json.dumps(SURFACES[name](), default=repr))
    return found


@pytest.mark.parametrize("name", SURFACES)
def test_surface_equals_the_snapshot(name: str) -> None:
    assert shown(name) == json.loads(SNAPSHOT.read_text(encoding="utf-8"))[name]


def main() -> None:
    """Write the snapshot."""
    parts = [
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in shown(name).items())
        + "\n}"
        for name in SURFACES
    ]
    SNAPSHOT.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
