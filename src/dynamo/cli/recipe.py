"""Recipes: `dynamo recipe list`, `show`, `validate`, `patch` and `run`."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from dynamo.cli.cluster import text_table
from dynamo.cli.manifests import Manifest, check_manifests, read_manifests
from dynamo.cli.verbs import run_verb
from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError
from dynamo.operator.validation.facts import AdmissionFacts
from dynamo.ops.doctor.command import print_report
from dynamo.ops.recipes.catalog import (
    DEPLOY,
    FRAMEWORKS,
    Recipe,
    find_recipes,
    recipe_at,
    root_of,
    select_recipe,
    selected,
)
from dynamo.ops.recipes.checks import report, rows_of_recipe
from dynamo.ops.recipes.parts import RecipeFiles, SourcedObject, gpu_total
from dynamo.ops.recipes.patch import RecipePatch, counts, pairs, patched
from dynamo.ops.report import CheckRow, CheckStatus, exit_status

HELP = """\
dynamo recipe: deployments of known models, below recipes/

  dynamo recipe list                     the recipes; --query, --framework, --mode and --gpu select
  dynamo recipe show NAME                files, GPUs, images, secrets and steps of one
  dynamo recipe validate NAME            check it without a cluster; exit status 1 for a blocker
  dynamo recipe patch NAME --output DIR  write it with another namespace, storage class, images or replicas
  dynamo recipe run NAME                 deploy it in order, wait, send a request, run its benchmark, collect the results

  NAME is MODEL/FRAMEWORK/MODE, a directory, or words that match one recipe. --help after a command lists its options.
"""
HEAD = ("MODEL", "FRAMEWORK", "MODE", "GPUS", "GPU", "PERF", "PATH")
ROOT_HELP = "Directory of the recipes; default: recipes here or above, else those of the package"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeListConfig:
    """List the recipes."""

    query: str = option("", "--query", None, "Only recipes whose name contains every word")
    framework: str = option("", "--framework", None, "Only recipes of this engine")
    mode: str = option("", "--mode", None, "Only recipes of this mode, such as agg, disagg or disagg-single-node")
    gpu: str = option("", "--gpu", None, "Only recipes of this GPU, such as h100")
    format: str = option("table", "--format", None, "Form of the output", choices=("table", "json"))
    json: bool = option(False, "--json", None, "The same as --format json")
    root: str | None = option(None, "--root", None, ROOT_HELP)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeTargetConfig:
    """Show or check one recipe."""

    target: str | None = option(None, "NAME", None, "Recipe: MODEL/FRAMEWORK/MODE, a directory, or words of its name")
    json: bool = option(False, "--json", None, "Print JSON")
    root: str | None = option(None, "--root", None, ROOT_HELP)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipePatchConfig(RecipeTargetConfig):
    """Adapt a recipe to a cluster."""

    namespace: str | None = option(None, "--namespace", None, "Namespace of all objects")
    storage_class: str | None = option(None, "--storage-class", None, "Storage class of the claims")
    images: list[str] = option([], "--image", None, "COMPONENT=IMAGE, or IMAGE for all components")
    tag: str | None = option(None, "--image-tag", None, "Tag of all images that are not replaced")
    replicas: list[str] = option([], "--replicas", None, "COMPONENT=NUMBER")
    output: str | None = option(None, "--output", None, "Directory for the changed files")

    def patch(self) -> RecipePatch:
        """Return the changes. Raise `ConfigError`."""
        return RecipePatch(
            namespace=self.namespace,
            storage_class=self.storage_class,
            images=pairs("--image", self.images),
            tag=self.tag,
            replicas=counts("--replicas", self.replicas),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRunConfig(RecipePatchConfig):
    """Deploy a recipe: claim, download, graph, request, benchmark."""

    dry_run: bool = option(False, "--dry-run", None, "Print the steps without a cluster")
    skip_download: bool = option(
        False, "--skip-download", None, "Do not run the download job: the model is in the claim"
    )
    benchmark: bool = option(True, "--benchmark", None, "Run the benchmark job of perf.yaml")
    url: str | None = option(None, "--url", None, "URL of the frontend for the request, as a port-forward provides it")
    download_timeout_s: float = option(6000.0, "--download-timeout-s", None, "Time for the download job, in seconds")
    ready_timeout_s: float = option(3600.0, "--ready-timeout-s", None, "Time for the graph to become ready, in seconds")
    benchmark_timeout_s: float = option(7200.0, "--benchmark-timeout-s", None, "Time for the benchmark job, in seconds")

    def __post_init__(self) -> None:
        for flag, value in (
            ("--download-timeout-s", self.download_timeout_s),
            ("--ready-timeout-s", self.ready_timeout_s),
            ("--benchmark-timeout-s", self.benchmark_timeout_s),
        ):
            if not value > 0:
                raise ConfigError(f"{flag} {value:g}: must be greater than 0")


def recipe(argv: Sequence[str]) -> int:
    """Run `dynamo recipe`. Raise `ConfigError` for wrong options and unreadable recipes."""
    return run_verb("dynamo recipe", HELP, VERBS, argv)


def list_recipes(argv: Sequence[str]) -> int:
    """Run `dynamo recipe list`."""
    config = load(RecipeListConfig, argv, prog="dynamo recipe list")
    recipes = selected(
        find_recipes(root_of(config.root)),
        query=config.query,
        framework=config.framework,
        mode=config.mode,
        gpu=config.gpu,
    )
    found = [(one, gpus_of(one)) for one in recipes]
    if config.json or config.format == "json":
        print(json.dumps([one.value(gpus) for one, gpus in found], indent=2))
    elif not found:
        print("No recipe matches.")
    else:
        rows = [
            (one.model, one.framework, one.mode, "?" if gpus is None else str(gpus), one.hardware or "-",
             "yes" if one.perf_yaml else "no", one.path)
            for one, gpus in found
        ]  # fmt: skip
        print(text_table([HEAD, *rows]))
    return 0


def gpus_of(one: Recipe) -> int | None:
    """Return the GPUs of a recipe; None if its graph cannot be read, which `validate` reports."""
    try:
        return gpu_total(files_of(one))
    except ConfigError:
        return None


def files_of(one: Recipe) -> RecipeFiles:
    """Return the objects of a recipe. Raise `ConfigError` for a file that cannot be read."""
    cache = sorted(str(path) for path in Path(one.model_cache_dir).glob("*.y*ml")) if one.model_cache_dir else []
    others = [
        str(path) for path in sorted(Path(one.path).glob("*.y*ml")) if str(path) not in {one.deploy_yaml, one.perf_yaml}
    ]
    return RecipeFiles(
        cache=sources(cache),
        deploy=sources([*others, one.deploy_yaml]),
        perf=sources([one.perf_yaml] if one.perf_yaml else []),
    )


def sources(names: Sequence[str]) -> tuple[SourcedObject, ...]:
    """Return the objects of files."""
    return tuple(SourcedObject(one.file, one.value) for one in read_manifests(names)) if names else ()


def checked(files: RecipeFiles, *, is_adapted: bool) -> list[CheckRow]:
    """Return the rows of a recipe, as shipped or adapted to a cluster."""
    manifests = [Manifest(one.file, one.value) for one in files.all]
    problems, warnings, _ = check_manifests(manifests, AdmissionFacts(may_exist=True))
    return rows_of_recipe(files, problems, warnings, is_adapted=is_adapted)


def target_of(config: RecipeTargetConfig) -> Recipe:
    """Return the recipe that a command line names. Raise `ConfigError`."""
    if not config.target:
        raise ConfigError("NAME: expected the name of a recipe (see dynamo recipe list)")
    path = Path(config.target)
    if config.root is None and path.exists():  # A recipe outside the directory of the recipes.
        folder = path.resolve() if path.is_dir() else path.resolve().parent
        if (folder / DEPLOY).is_file():
            return recipe_of_folder(folder)
    return select_recipe(find_recipes(root_of(config.root)), config.target)


def recipe_of_folder(folder: Path) -> Recipe:
    """Return the recipe of a directory, from the directories above it. Raise `ConfigError` if they name no framework."""
    found = next((one for root in folder.parents if (one := recipe_at(root, folder / DEPLOY))), None)
    if found is None:
        raise ConfigError(
            f"NAME {folder}: expected a path that ends with MODEL/FRAMEWORK/MODE; FRAMEWORK is {', '.join(FRAMEWORKS)}"
        )
    return found


def show(argv: Sequence[str]) -> int:
    """Run `dynamo recipe show`."""
    config = load(RecipeTargetConfig, argv, prog="dynamo recipe show")
    one = target_of(config)
    files = files_of(one)
    if config.json:
        print(report(one, files, checked(files, is_adapted=False)))
        return 0
    print(f"{one.name}: {gpu_total(files)} GPUs{f' ({one.hardware})' if one.hardware else ''}")
    for each in files.all:
        print(f"  {each.file}: {each.kind}/{each.name}")
    from dynamo.cli.recipe_run import steps_of

    for number, step in enumerate(steps_of(files, has_benchmark=True, skips_download=False), 1):
        print(f"{number}. {step.text}")
    return 0


def validate(argv: Sequence[str]) -> int:
    """Run `dynamo recipe validate`; return 1 for a blocker."""
    config = load(RecipeTargetConfig, argv, prog="dynamo recipe validate")
    one = target_of(config)
    files = files_of(one)
    rows = checked(files, is_adapted=False)
    if config.json:
        print(report(one, files, rows))
    else:
        print_report(rows, is_json=False)
    return exit_status(rows)


def patch(argv: Sequence[str]) -> int:
    """Run `dynamo recipe patch`; the recipe itself stays as it is."""
    config = load(RecipePatchConfig, argv, prog="dynamo recipe patch")
    if config.output is None:
        raise ConfigError("--output: missing; name a directory for the changed files")
    one = target_of(config)
    if config.patch().is_empty:
        raise ConfigError("nothing to change: give --namespace, --storage-class, --image, --image-tag or --replicas")
    files = patched(files_of(one), config.patch())
    written = write_files(one, files, Path(config.output))
    rows = checked(files, is_adapted=True)
    if config.json:
        print(
            json.dumps({"recipe": one.name, "files": written, "report": json.loads(report(one, files, rows))}, indent=2)
        )
        return exit_status(rows)
    for name in written:
        print(name)
    for row in rows:
        if row.status is CheckStatus.FAIL:
            sys.stderr.write(f"error: {row.check}: {row.evidence}; {row.remedy}\n")
    return exit_status(rows)


def write_files(one: Recipe, files: RecipeFiles, output: Path) -> list[str]:
    """Write the files of a recipe below a directory, each at its path below the model. Raise `ConfigError`."""
    model = Path(one.model_cache_dir).parent if one.model_cache_dir else Path(one.path).parents[1]
    texts: dict[Path, list[object]] = {}
    for each in files.all:
        texts.setdefault(output / Path(each.file).relative_to(model), []).append(each.value)
    try:
        for path, values in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(yaml.safe_dump_all(values, sort_keys=False, width=120), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}") from None
    return [str(path) for path in texts]


def run(argv: Sequence[str]) -> int:
    """Run `dynamo recipe run`; return 1 if a step fails."""
    from dynamo.cli.recipe_run import as_text, run_steps, steps_of

    config = load(RecipeRunConfig, argv, prog="dynamo recipe run")
    one = target_of(config)
    files = patched(files_of(one), config.patch())
    rows = checked(files, is_adapted=True)
    if exit_status(rows):
        print_report(rows, is_json=config.json)
        sys.stderr.write("error: the recipe has blockers; nothing was deployed\n")
        return 1
    steps = steps_of(files, has_benchmark=config.benchmark, skips_download=config.skip_download)
    if config.dry_run:
        print(json.dumps([step.text for step in steps], indent=2) if config.json else as_text(steps))
        return 0
    output = Path(config.output or f"recipe-{one.name.replace('/', '-')}")
    return asyncio.run(run_steps(steps, files, config, output))


VERBS = {"list": list_recipes, "show": show, "validate": validate, "patch": patch, "run": run}
