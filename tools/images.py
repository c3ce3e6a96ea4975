"""Build the container images of `container/` with Docker, Podman or Buildah, and push them on request.

    python -m tools.images --name frontend --name operator --registry registry.example.com/team --push
    python -m tools.images --debian-base --ca /etc/ssl/certs/ca-certificates.crt    # where no registry of images is reachable

`--pip-config` and `--ca` are mounted during the build only: no image contains them.
"""

import configparser
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.pages import ROOT

from dynamo import __version__
from dynamo.core.config import exit_on_config_error, load, option
from dynamo.core.errors import ConfigError

BUILDERS = ("docker", "podman", "buildah")
ENGINES = ("vllm", "sglang", "trtllm")
SERVICES = ("frontend", "operator", "epp", "planner", "mocker")
PROBE_S, BUILD_S = 30.0, 3600.0
RELEASE, MIRROR = "bookworm", "http://deb.debian.org/debian"
SLIM_BASE, BUILD_BASE = "localhost/python-debian:slim", "localhost/python-debian:build"
SLIM_PACKAGES = "python3,python3-venv,ca-certificates"
BUILD_PACKAGES = "gcc libc6-dev python3-dev python3-pip"
PIP_CA = "/etc/pip-ca.crt"
"""Place of `--ca` during a build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Build container images."""

    names: list[str] = option([], "--name", None, f"Images to build; default: {', '.join(SERVICES)}")
    builder: str | None = option(
        None, "--builder", None, "Program that builds; default: the first that works", choices=BUILDERS
    )
    registry: str | None = option(
        None, "--registry", None, "Start of the images' names, such as registry.example.com/team"
    )
    tag: str = option(__version__, "--tag", None, "Tag of the images")
    push: bool = option(False, "--push", None, "Push the images to the registry")
    debian_base: bool = option(
        False, "--debian-base", None, "Base the images on Debian packages (debootstrap, as root)"
    )
    engine_image: str | None = option(
        None, "--engine-image", None, "Image of the engine that an engine's image is based on"
    )
    pip_config: Path | None = option(None, "--pip-config", None, "pip.conf for the build, such as one with an index")
    ca: Path | None = option(None, "--ca", None, "Certificates (PEM) that pip trusts during the build")

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in SERVICES + ENGINES:
                raise ConfigError(f"--name {name}: must be one of {', '.join(SERVICES + ENGINES)}")
        for flag, path in (("--pip-config", self.pip_config), ("--ca", self.ca)):
            if path is not None and not path.is_file():
                raise ConfigError(f"{flag} {path}: no such file")
        if self.push and not self.registry:
            raise ConfigError("--push: requires --registry")
        engines = [name for name in self.names if name in ENGINES]
        if self.engine_image and len(engines) != 1:
            raise ConfigError(f"--engine-image {self.engine_image}: requires one --name of {', '.join(ENGINES)}")
        if self.debian_base and engines and not self.engine_image:
            raise ConfigError(f"--debian-base --name {engines[0]}: requires --engine-image")

    def image(self, name: str) -> str:
        """Return the full name of an image."""
        short = f"{name}-runtime" if name in ENGINES else f"dynamo-{name}"
        return f"{self.registry or 'localhost'}/{short}:{self.tag}"


def builder_of(wanted: str | None) -> str:
    """Return the program that builds. Raise `ConfigError`."""
    for name in (wanted,) if wanted else BUILDERS:
        if shutil.which(name) is None:
            continue
        try:
            probe = subprocess.run([name, "info"], capture_output=True, timeout=PROBE_S, check=False)
        except subprocess.TimeoutExpired:
            continue
        if probe.returncode == 0:
            return name
    raise ConfigError(
        f"--builder {wanted}: not installed, or `{wanted} info` fails" if wanted else
        f"no builder of images works here: install one of {', '.join(BUILDERS)}"
    )  # fmt: skip


def run(command: list[str], purpose: str) -> None:
    """Run a command whose output is shown. Raise `ConfigError` if it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=BUILD_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{purpose}: not done within {BUILD_S:g} s") from None
    except FileNotFoundError:
        raise ConfigError(f"{purpose}: {command[0]} is not installed") from None
    if done.returncode != 0:
        raise ConfigError(f"{purpose}: {command[0]} failed with status {done.returncode}; its messages are above")


def exists(builder: str, image: str) -> bool:
    """Return whether the builder's store has an image."""
    done = subprocess.run([builder, "images", "-q", image], capture_output=True, text=True, check=False)
    return done.returncode == 0 and bool(done.stdout.strip())


def make_bases(builder: str) -> None:
    """Make the two base images from Debian packages; a slim one that exists is used."""
    with tempfile.TemporaryDirectory() as folder:
        context, file = Path(folder), f"{folder}/Containerfile"
        if not exists(builder, SLIM_BASE):
            command = ["debootstrap", "--variant=minbase", f"--include={SLIM_PACKAGES}", RELEASE, f"{folder}/system"]
            run([*command, MIRROR], "base image")
            run(["tar", "-C", f"{folder}/system", "-cf", f"{folder}/system.tar", "."], "base image")
            shutil.rmtree(context / "system")
            (context / "Containerfile").write_text("FROM scratch\nADD system.tar /\n")
            run([*build_command(builder), "-f", file, "-t", SLIM_BASE, folder], "base image")
        install = f"apt-get update && apt-get install -y --no-install-recommends {BUILD_PACKAGES}"
        (context / "Containerfile").write_text(f"FROM {SLIM_BASE}\nRUN {install}\n")
        run([*build_command(builder), "-f", file, "-t", BUILD_BASE, folder], "base image")


def build_command(builder: str) -> list[str]:
    """Return the start of a build's command; layers that exist are used, as Docker and Podman do by default."""
    return [builder, "build", *(["--layers"] if builder == "buildah" else [])]


def write_pip_config(path: Path, options: ImageOptions) -> None:
    """Write the configuration of pip for the build. Raise `ConfigError`."""
    parser = configparser.RawConfigParser()
    try:
        parser.read([options.pip_config] if options.pip_config is not None else [])
    except configparser.Error as error:
        raise ConfigError(f"--pip-config {options.pip_config}: {str(error).splitlines()[0]}") from None
    if options.ca is not None:
        parser.read_dict({"global": {"cert": PIP_CA}})
    with path.open("w") as file:
        parser.write(file)


def build(builder: str, options: ImageOptions, name: str, secrets: Path) -> None:
    """Build one image. Raise `ConfigError`."""
    flags = ["-f", f"container/Containerfile.{name}", "-t", options.image(name)]
    if options.debian_base:
        flags += ["--build-arg", f"PYTHON_IMAGE={BUILD_BASE}", "--build-arg", f"BASE_IMAGE={SLIM_BASE}"]
    if options.engine_image and name in ENGINES:
        flags += ["--build-arg", f"ENGINE_IMAGE={options.engine_image}"]
    if options.ca is not None:
        flags += ["--secret", f"id=ca.crt,src={options.ca.resolve()}"]
    if options.ca is not None or options.pip_config is not None:
        config = secrets / "pip.conf"
        write_pip_config(config, options)
        flags += ["--secret", f"id=pip.conf,src={config}"]
    run([*build_command(builder), *flags, "."], f"image {options.image(name)}")


def main() -> int:
    """Build, and push on request; print the images' names."""
    options = load(ImageOptions, sys.argv[1:], prog="python -m tools.images")
    builder = builder_of(options.builder)
    if options.debian_base:
        make_bases(builder)
    names = options.names or list(SERVICES)
    with tempfile.TemporaryDirectory() as secrets:
        for name in names:
            build(builder, options, name, Path(secrets))
    for name in names if options.push else ():
        run([builder, "push", options.image(name)], f"push of {options.image(name)}")
    print("\n".join(options.image(name) for name in names))
    return 0


if __name__ == "__main__":
    exit_on_config_error(main)
