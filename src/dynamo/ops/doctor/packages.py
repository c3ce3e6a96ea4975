"""Collector of the interpreter and of installed distributions."""

import importlib.metadata
import platform
import sys
from collections.abc import Iterable, Sequence

import dynamo
from dynamo.core.extras import DISTRIBUTION, install_command, interpreter
from dynamo.ops.doctor.facts import Distribution, PackageFacts

EXTRAS = ("grpc", "kubernetes", "nats", "otel", "planner", "s3", "nixl", "vllm", "sglang", "trtllm")
"""Extras of features; those of tests and tools are not reported."""


def package_facts() -> PackageFacts:
    """Return the facts about this process's environment."""
    try:
        lines: Sequence[str] = importlib.metadata.requires(DISTRIBUTION) or ()
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        lines, version = (), None
    try:
        required = distributions(lines, "")
        extras = {extra: found for extra in EXTRAS if (found := distributions(lines, extra))}
    except ImportError:  # `packaging`, without which requirements cannot be read.
        required, extras = (Distribution(name="packaging", specifier="", installed=None),), {}
    return PackageFacts(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        implementation=platform.python_implementation(),
        executable=sys.executable,
        is_installed=version is not None,
        version=dynamo.__version__,
        metadata_version=version,
        required=required,
        extras=extras,
        install={extra: install_command(extra) for extra in EXTRAS}
        | {"": f"{interpreter(sys.executable, '')} -m pip install --force-reinstall {DISTRIBUTION}"},
    )


def distributions(lines: Iterable[str], extra: str) -> tuple[Distribution, ...]:
    """Return the requirements of an extra that apply to this platform; those of no extra for an empty name."""
    from packaging.requirements import Requirement

    found = []
    for line in lines:
        one = Requirement(line)
        is_of_extra = one.marker is not None and "extra ==" in str(one.marker)
        if is_of_extra != bool(extra) or one.name == DISTRIBUTION:
            continue
        if one.marker is not None and not one.marker.evaluate({"extra": extra}):
            continue
        installed = installed_version(one.name)
        is_accepted = installed is None or one.specifier.contains(installed, prereleases=True)
        found.append(
            Distribution(name=one.name, specifier=str(one.specifier), installed=installed, is_accepted=is_accepted)
        )
    return tuple(found)


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
