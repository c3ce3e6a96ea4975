"""Checks of the interpreter, of required distributions, of optional extras and of the model's files. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from dynamo.ops.doctor.facts import CheckpointFacts, Distribution, PackageFacts, PartFacts
from dynamo.ops.report import CheckRow, failed, passed, skipped, warned

PYTHON_MIN = (3, 11)
SHOWN_MAX = 4  # Names in one row; the first ones suffice to see the pattern.


def package_rows(facts: PackageFacts, variables: Mapping[str, str]) -> Iterator[CheckRow]:
    """Yield the rows of the interpreter and the distributions."""
    yield _python(facts)
    yield _packages(facts)
    yield from _extras(facts, needed_extras(variables))


def _python(facts: PackageFacts) -> CheckRow:
    version = ".".join(map(str, facts.python))
    evidence = f"{facts.implementation} {version} ({facts.executable})"
    if facts.python[:2] < PYTHON_MIN:
        least = ".".join(map(str, PYTHON_MIN))
        return failed("python", evidence, f"install Python {least} or newer and create the environment with it")
    return passed("python", evidence)


def _packages(facts: PackageFacts) -> CheckRow:
    if not facts.is_installed:
        return skipped("packages", f"dynamo {facts.version} is imported from a source tree that is not installed")
    missing = [one.name for one in facts.required if one.installed is None]
    wrong = [describe(one) for one in facts.required if one.installed is not None and not one.is_accepted]
    remedy = f"run: {facts.install.get('', 'pip install dynamo-serve')}"
    if missing:
        return failed("packages", f"not installed: {shortened(missing)}", remedy)
    if wrong:
        return failed("packages", f"unsupported versions: {shortened(wrong)}", remedy)
    if facts.metadata_version != facts.version:
        return warned(
            "packages",
            f"the installed distribution is {facts.metadata_version}, the imported package is {facts.version}",
            "remove one of them: another copy precedes the installed one on sys.path (PYTHONPATH)",
        )
    return passed("packages", f"dynamo {facts.version}; {len(facts.required)} required distributions")


def needed_extras(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the extras that the present settings need, each with the setting that needs it."""
    found: dict[str, str] = {}
    for name in ("DYN_REQUEST_PLANE", "DYN_EVENT_PLANE"):
        if variables.get(name) == "nats":
            found["nats"] = f"{name}=nats"
    if variables.get("OTEL_EXPORT_ENABLED", "").lower() in {"1", "true"}:
        found["otel"] = f"OTEL_EXPORT_ENABLED={variables['OTEL_EXPORT_ENABLED']}"
    return found


def _extras(facts: PackageFacts, needed: Mapping[str, str]) -> Iterator[CheckRow]:
    complete = [extra for extra, parts in facts.extras.items() if all(part.installed for part in parts)]
    absent = [extra for extra in facts.extras if extra not in complete]
    if facts.extras:
        text = f"installed: {', '.join(complete) or 'none'}"
        yield passed("extras", f"{text}; not installed: {', '.join(absent)}" if absent else text)
    for extra, parts in facts.extras.items():
        install = f"run: {facts.install.get(extra, f'pip install dynamo-serve[{extra}]')}"
        missing = [part.name for part in parts if part.installed is None]
        wrong = [describe(part) for part in parts if part.installed is not None and not part.is_accepted]
        if missing and extra in needed:
            yield failed(f"extra {extra}", f"{needed[extra]}, but {shortened(missing)} is not installed", install)
        elif wrong:
            row = failed if extra in needed else warned
            yield row(f"extra {extra}", f"unsupported versions: {shortened(wrong)}", install)


def describe(one: Distribution) -> str:
    """Return an installed version with the accepted ones."""
    return f"{one.name} {one.installed} (needs {one.specifier or 'any'})"


def version_row(parts: Sequence[PartFacts], frontend_version: str, version: str) -> CheckRow:
    """Return the row of the versions of a running graph's processes."""
    known = {part.name: f"{part.product} {part.version}" for part in parts if part.version}
    if frontend_version:
        known.setdefault("frontend", f"dynamo-serve {frontend_version}")
    if not known:
        return skipped("versions", "no process of a graph runs on this machine")
    releases = {text.rpartition(" ")[2] for text in known.values()}
    if len(releases) > 1:
        by_release = {text: [name for name, other in known.items() if other == text] for text in known.values()}
        rarest = sorted(by_release.items(), key=lambda pair: len(pair[1]))
        listed = "; ".join(f"{text}: {shortened(names)}" for text, names in rarest)
        return warned(
            "versions",
            f"processes of this machine have different releases: {listed}",
            f"restart all processes from one environment; this command is {version}",
        )
    if releases != {version}:
        return warned(
            "versions",
            f"running processes are {', '.join(releases)}, this command is {version}",
            "restart the processes to use the installed version",
        )
    return passed("versions", f"{len(known)} processes of release {version}")


def checkpoint_row(facts: CheckpointFacts) -> CheckRow:
    """Return the row of the model that is to be served."""
    if facts.is_file:
        return failed("model", f"{facts.given}: is a file", "give the directory that contains config.json")
    if not facts.path:
        return _absent_model(facts)
    if facts.config_error:
        return failed(
            "model",
            f"{facts.path}: {facts.config_error}",
            "give the directory of a checkpoint in Hugging Face layout: config.json, tokenizer.json, *.safetensors",
        )
    if facts.placeholders:
        return failed(
            "model",
            f"{facts.path}: weights are not downloaded: {shortened(facts.placeholders)}",
            "the files are Git LFS pointers or empty; run git lfs pull there, or download the model again",
        )
    if facts.missing:
        return failed(
            "model",
            f"{facts.path}: weights are missing: {shortened(facts.missing)}",
            "the download is incomplete; download the model again",
        )
    if not facts.has_tokenizer:
        return warned(
            "model",
            f"{facts.path}: no tokenizer.json",
            "copy the tokenizer's files of the model there; a frontend cannot tokenize without them",
        )
    size = f"{facts.weights_bytes / 2**30:.1f} GiB" if facts.weights_bytes else "no safetensors"
    return passed("model", f"{facts.path}: {facts.architecture or 'unknown architecture'}, {size}")


def _absent_model(facts: CheckpointFacts) -> CheckRow:
    if not facts.is_name:
        hint = f"did you mean {facts.nearest}?" if facts.nearest else "give an existing directory"
        return failed("model", f"{facts.given}: no such directory", hint)
    if facts.is_offline:
        return failed(
            "model",
            f"{facts.given}: not in the local cache, and HF_HUB_OFFLINE forbids downloads",
            "unset HF_HUB_OFFLINE, or download the model on a machine with network access",
        )
    token = "a token is configured" if facts.has_token else "no token is configured"
    return warned(
        "model",
        f"{facts.given}: no such directory; taken as a name on the Hugging Face hub, not in the local cache; {token}",
        "the first start downloads it; gated models require HF_TOKEN"
        + (f"; or {facts.nearest}?" if facts.nearest else ""),
    )


def shortened(names: Sequence[str]) -> str:
    """Return the first names, and how many others there are."""
    rest = len(names) - SHOWN_MAX
    return ", ".join(names[:SHOWN_MAX]) + (f" and {rest} more" if rest > 0 else "")
