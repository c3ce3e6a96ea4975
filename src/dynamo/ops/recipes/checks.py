"""Checks of a recipe without a cluster: schema, GPU arithmetic, claims, secrets, images, placeholders, agreement of its files. Pure."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from dynamo.ops.recipes.catalog import Recipe
from dynamo.ops.recipes.parts import (
    PLACEHOLDER,
    RecipeFiles,
    claims_made,
    claims_used,
    components,
    engine_gpus,
    environment,
    flag_value,
    gpu_total,
    images,
    secrets_used,
    served_models,
    tokens_of,
    values_at,
    walk,
)
from dynamo.ops.report import CheckRow, CheckStatus, failed, passed, row_value, skipped, verdict, warned

BLOCKING = ("storageClassName", "image", "claimName", "namespace")
"""Keys whose placeholder prevents the deployment."""
CHOSEN = {"storageClassName": "--storage-class CLASS"}
"""Keys whose value depends on the cluster, and the option of `run` and `patch` that sets it."""
PATCH = "replace it: dynamo recipe patch"
TOKEN_SECRET = "hf-token-secret"  # noqa: S105 - the name of a secret


def rows_of_recipe(
    files: RecipeFiles, problems: Sequence[str], warnings: Sequence[str], *, is_adapted: bool
) -> list[CheckRow]:
    """Return the rows; `problems` and `warnings` are those of the schemas and the admission rules.

    In a recipe that is adapted to a cluster, a placeholder of a value that depends on the cluster is a blocker too.
    """
    return [
        *_schema_rows(files, problems, warnings),
        *_gpu_rows(files),
        *_claim_rows(files),
        *_secret_rows(files),
        *_image_rows(files),
        *_placeholder_rows(files, is_adapted=is_adapted),
        *_perf_rows(files),
    ]


def _schema_rows(files: RecipeFiles, problems: Sequence[str], warnings: Sequence[str]) -> Iterator[CheckRow]:
    for text in problems:
        yield failed("schema", text, "correct the field")
    for text in warnings:
        yield warned("schema", text, "correct the field")
    if not files.graphs:
        yield failed("schema", "deploy.yaml contains no DynamoGraphDeployment", "add the graph")
    elif not problems:
        yield passed("schema", f"{len(files.all)} objects; graphs: {', '.join(one.name for one in files.graphs)}")


def _gpu_rows(files: RecipeFiles) -> Iterator[CheckRow]:
    for graph in files.graphs:
        for one in components(graph):
            if not one.is_worker:
                continue
            needed, given = engine_gpus(one), one.gpus * (one.node_count or 1)
            where = f"{graph.name}/{one.name}"
            if needed is None:
                yield skipped("gpus", f"{where}: parallel sizes are not numbers")
            elif not given and needed == 1:
                yield passed("gpus", f"{where}: no GPU is requested")
            elif needed > given:
                remedy = f"request nvidia.com/gpu: {needed}, or reduce the sizes"
                yield failed("gpus", f"{where}: parallel sizes need {needed} GPUs, {given} are requested", remedy)
            elif needed < given:
                remedy = "raise the parallel size, or request fewer GPUs"
                yield warned("gpus", f"{where}: {given} GPUs are requested, parallel sizes use {needed}", remedy)
            else:
                yield passed("gpus", f"{where}: {one.replicas_or_default} x {given} GPUs")


def _claim_rows(files: RecipeFiles) -> Iterator[CheckRow]:
    made = claims_made(files)
    for claim in sorted({claim for one in files.all for claim in claims_used(one.value)}):
        if claim in made:
            yield passed("claims", f"{claim} is created by the recipe")
        else:
            yield warned(
                "claims", f"{claim} is mounted and not created by the recipe", "create it before the deployment"
            )
    for one in files.cache:
        if one.kind == "PersistentVolumeClaim" and not part_of(one.value, "storageClassName"):
            yield warned(
                "claims",
                f"{one.name} has no storageClassName",
                "set one with --storage-class, or use the default class",
            )


def part_of(value: Any, key: str) -> str:
    """Return the first text at a key, at any depth; empty without one."""
    return next(iter(values_at(value, key)), "")


def _secret_rows(files: RecipeFiles) -> Iterator[CheckRow]:
    made = {one.name for one in files.all if one.kind == "Secret"}
    for name in sorted({name for one in files.all for name in secrets_used(one.value)}):
        if name in made:
            yield warned("secrets", f"{name} is part of the files", "keep secrets out of the repository")
        elif name == TOKEN_SECRET:
            yield passed(
                "secrets", f"{name} is required: kubectl create secret generic {name} --from-literal=HF_TOKEN=…"
            )
        else:
            yield passed("secrets", f"{name} is required in the namespace")


def _image_rows(files: RecipeFiles) -> Iterator[CheckRow]:
    found = sorted({(one.file, image) for one in files.all for image in images(one.value)})
    unpinned = [(file, image) for file, image in found if not is_pinned(image) and not PLACEHOLDER.search(image)]
    for file, image in unpinned:
        yield warned("images", f"{file}: {image} names no fixed version", "name a tag other than latest, or a digest")
    if found and not unpinned:
        yield passed("images", f"{len({image for _, image in found})} images, each with a tag or digest")


def is_pinned(image: str) -> bool:
    """Return whether an image names a version: a digest, or a tag other than latest."""
    if "@sha256:" in image:
        return True
    _, colon, tag = image.rpartition("/")[2].partition(":")
    return bool(colon) and tag not in {"", "latest"}


def _placeholder_rows(files: RecipeFiles, *, is_adapted: bool) -> Iterator[CheckRow]:
    for one in files.all:
        for path, value in walk(one.value):
            match = PLACEHOLDER.search(value) if isinstance(value, str) and "\n" not in value else None
            if match is None:
                continue
            evidence = f"{one.file}: {one.kind}/{one.name}: {path}: {match[0]}"
            key = path.rpartition(".")[2]
            if key in CHOSEN and not is_adapted:
                yield warned("placeholders", evidence, f"give {CHOSEN[key]} to dynamo recipe run or patch")
            elif key in BLOCKING:
                yield failed("placeholders", evidence, f"give {CHOSEN[key]}" if key in CHOSEN else PATCH)
            else:
                yield warned("placeholders", evidence, "replace it if it is not intended")


def _perf_rows(files: RecipeFiles) -> Iterator[CheckRow]:
    if not files.perf:
        yield skipped("benchmark", "no perf.yaml")
        return
    fronts = {
        f"{graph.name}-{one.name.lower()}"
        for graph in files.graphs
        for one in components(graph)
        if one.type == "frontend"
    }
    served = served_models(files)
    for one in files.perf:
        if one.kind != "Job":
            continue
        variables = environment(one.value)
        endpoint, model = variables.get("ENDPOINT", ""), variables.get("TARGET_MODEL", "")
        if endpoint and fronts and not any(front in endpoint for front in fronts):
            remedy = f"name the service of the frontend: {', '.join(sorted(fronts))}"
            yield failed("benchmark", f"{one.name}: ENDPOINT {endpoint} is not a frontend of the graph", remedy)
        elif model and served and model not in served:
            remedy = f"name a served model: {', '.join(sorted(served))}"
            yield warned("benchmark", f"{one.name}: TARGET_MODEL {model} is not served by the graph", remedy)
        else:
            yield passed("benchmark", f"{one.name}: {model or 'model'} at {endpoint or 'its endpoint'}")
        count = variables.get("DEPLOYMENT_GPU_COUNT", "")
        if count.isdigit() and int(count) != gpu_total(files):
            remedy = f"set DEPLOYMENT_GPU_COUNT to {gpu_total(files)}"
            yield warned(
                "benchmark", f"{one.name}: DEPLOYMENT_GPU_COUNT {count}, the graph has {gpu_total(files)} GPUs", remedy
            )


def router_flags(files: RecipeFiles) -> list[str]:
    """Return the router modes that the frontends are started with."""
    found = []
    for graph in files.graphs:
        for one in components(graph):
            mode = flag_value(tokens_of(one), "--router-mode")
            found += [f"--router-mode {mode}"] if mode else []
            found += [
                f"DYN_ROUTER_MODE={value}"
                for path, value in walk(one.raw)
                if value and path.endswith("DYN_ROUTER_MODE")
            ]
    return found


def report(recipe: Recipe, files: RecipeFiles, rows: Sequence[CheckRow]) -> str:
    """Return the validation as JSON with upstream's fields, and the rows."""
    return json.dumps(
        {
            "target": recipe.path,
            "deploy_files": sorted({one.file for one in files.deploy}),
            "perf_files": sorted({one.file for one in files.perf}),
            "model_cache_files": sorted({one.file for one in files.cache}),
            "deployment_names": [one.name for one in files.graphs],
            "gpu_count_hint": gpu_total(files),
            "interesting_lines": {
                "storageClassName": sorted(
                    {text for one in files.all for text in values_at(one.value, "storageClassName")}
                ),
                "images": sorted({text for one in files.all for text in images(one.value)}),
                "hf_secret": sorted({name for one in files.all for name in secrets_used(one.value)}),
                "router": router_flags(files),
            },
            "warnings": [f"{row.check}: {row.evidence}" for row in rows if row.status is CheckStatus.WARN],
            "blockers": [f"{row.check}: {row.evidence}" for row in rows if row.status is CheckStatus.FAIL],
            "verdict": verdict(rows).value,
            "rows": [row_value(row) for row in rows],
        },
        indent=2,
    )
