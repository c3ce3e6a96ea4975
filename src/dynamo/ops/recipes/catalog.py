"""Catalog: the recipes below a directory, by model, framework, mode and GPU.

Layout: `MODEL/FRAMEWORK/MODE[/…]/deploy.yaml` with an optional `perf.yaml`, and `MODEL/model-cache/` with the claim and the
download job of the model.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dynamo.core.errors import ConfigError

FRAMEWORKS = ("vllm", "sglang", "trtllm", "tokenspeed", "cpu", "mocker")
HARDWARE = re.compile(r"(?:^|[-_/])(gb\d00|[bh][12]00|h20|a100|a30|l40s?|l4|t4|mi\d00)(?=$|[-_/])", re.IGNORECASE)
DEPLOY, PERF, MODEL_CACHE = "deploy.yaml", "perf.yaml", "model-cache"
RECIPES_MAX = 1000
DEFAULT_ROOT = "recipes"
SHIPPED = Path(__file__).with_name("shipped")
"""The recipes that are installed with the package: a link to `recipes` of the repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One deployment of a model."""

    model: str
    framework: str
    mode: str
    hardware: str
    path: str
    """Directory of the deployment."""
    deploy_yaml: str
    perf_yaml: str | None
    model_cache_dir: str | None

    @property
    def name(self) -> str:
        """Return the name that selects this recipe: its path below the root."""
        return f"{self.model}/{self.framework}/{self.mode}"

    def value(self, gpus: int | None) -> dict[str, Any]:
        """Return the recipe as a JSON object."""
        return {**asdict(self), "name": self.name, "gpu_count_hint": gpus}


def root_of(given: str | None, start: Path | None = None) -> Path:
    """Return the directory of the recipes: the given one, `recipes` here or in a parent, or that of the package.

    Raise `ConfigError`.
    """
    if given is not None:
        if not Path(given).is_dir():
            raise ConfigError(f"--root {given}: no such directory")
        return Path(given)
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / DEFAULT_ROOT).is_dir():
            return folder / DEFAULT_ROOT
    if SHIPPED.is_dir():
        return SHIPPED
    raise ConfigError(f"--root: no directory {DEFAULT_ROOT} here or above; name one with --root DIRECTORY")


def find_recipes(root: Path) -> list[Recipe]:
    """Return the recipes below a directory, sorted by name."""
    found = (recipe_at(root, deploy) for deploy in sorted(root.rglob(DEPLOY))[:RECIPES_MAX])
    return [one for one in found if one is not None]


def recipe_at(root: Path, deploy: Path) -> Recipe | None:
    """Return the recipe of a deploy.yaml below a directory of recipes; None if its path names no model, framework and mode."""
    parts = deploy.relative_to(root).parts[:-1]
    at = next((index for index, part in enumerate(parts) if part in FRAMEWORKS and index > 0), None)
    if at is None or at + 1 >= len(parts):
        return None
    mode = "/".join(parts[at + 1 :])
    hardware = HARDWARE.search(mode)
    cache = root.joinpath(*parts[:at]) / MODEL_CACHE
    perf = deploy.parent / PERF
    return Recipe(
        model="/".join(parts[:at]),
        framework=parts[at],
        mode=mode,
        hardware=hardware[1].lower() if hardware else "",
        path=str(deploy.parent),
        deploy_yaml=str(deploy),
        perf_yaml=str(perf) if perf.is_file() else None,
        model_cache_dir=str(cache) if cache.is_dir() else None,
    )


def selected(
    recipes: Sequence[Recipe], *, query: str = "", framework: str = "", mode: str = "", gpu: str = ""
) -> list[Recipe]:
    """Return the recipes that match every word of the query and the given fields; a mode matches by its first part."""
    words = query.lower().split()
    return [
        one
        for one in recipes
        if all(word in f"{one.name} {one.hardware}".lower() for word in words)
        and framework in {"", one.framework}
        and (not mode or one.mode == mode or re.split(r"[-/]", one.mode)[0] == mode)
        and (not gpu or one.hardware == gpu.lower())
    ]


def select_recipe(recipes: Sequence[Recipe], target: str) -> Recipe:
    """Return the recipe of a name, a directory or a deploy.yaml. Raise `ConfigError` unless exactly one matches."""
    path = Path(target).resolve()
    exact = [
        one
        for one in recipes
        if target == one.name or path in {Path(one.path).resolve(), Path(one.deploy_yaml).resolve()}
    ]
    within = [one for one in recipes if path in Path(one.path).resolve().parents]
    words = set(target.lower().split())
    whole = [one for one in recipes if words <= {*re.split("[/]", one.name.lower()), one.hardware}]
    found = exact or within or whole or selected(recipes, query=target)
    if len(found) == 1:
        return found[0]
    names = ", ".join(one.name for one in (found or recipes)[:12])
    reason = f"{len(found)} recipes match" if found else "no such recipe; known"
    raise ConfigError(f"{target}: {reason}: {names or 'none'}")
