"""Stand-in for Grove's controllers: PodCliqueSets with their PodCliques and PodCliqueScalingGroups."""

from typing import TYPE_CHECKING, Any

from tests.cluster.kubernetes.errors import Object
from tests.cluster.kubernetes.resources import GroupPlural
from tests.cluster.kubernetes.workloads import child_metadata, is_ready, template_hash, with_labels

if TYPE_CHECKING:
    from tests.cluster.kubernetes.controllers import Controllers

CLIQUE_SETS, CLIQUES = ("grove.io", "podcliquesets"), ("grove.io", "podcliques")
SCALING_GROUPS = ("grove.io", "podcliquescalinggroups")
GROUP, GROUP_REPLICA = "grove.io/podcliquescalinggroup", "grove.io/podcliquescalinggroup-replica-index"
POD_INDEX = "grove.io/podclique-pod-index"
PART_OF, REVISION = "app.kubernetes.io/part-of", "grove.io/pod-template-hash"
Place = tuple[GroupPlural, str]


async def clique_set(run: "Controllers", key: GroupPlural, item: Object) -> None:
    """Keep the PodCliques and PodCliqueScalingGroups of a PodCliqueSet; existing ones keep their replicas."""
    name = item["metadata"]["name"]
    wanted = _children(run, item)
    found = {(of, one["metadata"]["name"]): one for of in (CLIQUES, SCALING_GROUPS) for one in run.children(of, item)}
    for at in set(found) - set(wanted):
        await run.delete_child(at[0], found.pop(at))
    for at, one in wanted.items():
        labels = {**(one.get("labels") or {}), PART_OF: name}
        template = {"metadata": {"labels": labels, "annotations": one.get("annotations")}}
        if at not in found:
            body = {"metadata": child_metadata(item, at[1], template), "spec": one["spec"]}
            found[at] = await run.create(at[0], item["metadata"]["namespace"], body)
        else:
            found[at] = _update(run, at[0], found[at], template["metadata"], one["spec"])
    _report_groups(run, name, found)
    present = [one for at, one in found.items() if at[0] == CLIQUES]
    replicas = item["spec"].get("replicas", 1)
    run.put_status(
        key, item, replicas=replicas, updatedReplicas=replicas if all(map(_is_updated, present)) else 0,
        availableReplicas=replicas if all(map(_is_clique_ready, present)) else 0,
        observedGeneration=item["metadata"]["generation"],
    )  # fmt: skip


def _children(run: "Controllers", item: Object) -> dict[Place, Object]:
    """Return the children that a set should have, by kind and name."""
    template, name = item["spec"]["template"], item["metadata"]["name"]
    cliques = {one["name"]: one for one in template.get("cliques") or []}
    groups = template.get("podCliqueScalingGroups") or []
    grouped = {member for one in groups for member in one["cliqueNames"]}
    wanted: dict[Place, Object] = {}
    for index in range(item["spec"].get("replicas", 1)):
        for clique in cliques.values():
            if clique["name"] not in grouped:
                wanted[CLIQUES, f"{name}-{index}-{clique['name']}"] = clique
        for group in groups:
            at = f"{name}-{index}-{group['name']}"
            replicas = group.get("replicas", 1)
            wanted[SCALING_GROUPS, at] = {"spec": {"replicas": replicas, "cliqueNames": group["cliqueNames"]}}
            scaled = run.api.storage.get(SCALING_GROUPS, (item["metadata"]["namespace"], at))
            for replica in range(scaled["spec"]["replicas"] if scaled else replicas):
                labels = {GROUP: at, GROUP_REPLICA: str(replica)}
                for member in group["cliqueNames"]:
                    made = {**cliques[member], "labels": {**(cliques[member].get("labels") or {}), **labels}}
                    wanted[CLIQUES, f"{at}-{replica}-{member}"] = made
    return wanted


def _update(run: "Controllers", key: GroupPlural, item: Object, metadata: Object, spec: Object) -> Object:
    """Bring a child to the content of the set's template, apart from its replicas."""
    new = {**spec, "replicas": item["spec"].get("replicas", spec.get("replicas", 1))}
    changed = {**item["metadata"], "labels": metadata["labels"], "annotations": metadata.get("annotations") or {}}
    if new == item["spec"] and changed == item["metadata"]:
        return item
    changed["generation"] = item["metadata"].get("generation", 0) + 1
    run.put(key, {**item, "metadata": changed, "spec": new})
    return {**item, "metadata": changed, "spec": new}


def _is_updated(item: Object) -> bool:
    status: Object = item.get("status") or {}
    is_seen = status.get("observedGeneration", 0) >= item["metadata"].get("generation", 1)
    return bool(is_seen and status.get("updatedReplicas", -1) >= item["spec"].get("replicas", 1))


def _is_clique_ready(item: Object) -> bool:
    return bool((item.get("status") or {}).get("readyReplicas", -1) >= item["spec"].get("replicas", 1))


def _report_groups(run: "Controllers", name: str, found: dict[Place, Object]) -> None:
    for (of, at), one in found.items():
        if of != SCALING_GROUPS:
            continue
        replicas = one["spec"]["replicas"]
        members = [
            [c for (k, n), c in found.items() if k == CLIQUES and n.startswith(f"{at}-{index}-")]
            for index in range(replicas)
        ]
        ready = sum(bool(several) and all(map(_is_clique_ready, several)) for several in members)
        updated = sum(bool(several) and all(map(_is_updated, several)) for several in members)
        run.put_status(
            of, one, replicas=replicas, scheduledReplicas=replicas, availableReplicas=ready, updatedReplicas=updated,
            observedGeneration=one["metadata"]["generation"], selector=f"{PART_OF}={name}",
        )  # fmt: skip


async def clique(run: "Controllers", key: GroupPlural, item: Object) -> None:
    """Keep the pods of a PodClique. Pods of another template are replaced one after another, or when deleted."""
    name, replicas = item["metadata"]["name"], item["spec"].get("replicas", 1)
    metadata = {one: item["metadata"].get(one) for one in ("labels", "annotations")}
    revision = template_hash([metadata, item["spec"]["podSpec"]])
    template = with_labels({"metadata": metadata, "spec": item["spec"]["podSpec"]}, {REVISION: revision})
    wanted = {f"{name}-{index}": with_labels(template, {POD_INDEX: str(index)}) for index in range(replicas)}
    pods = await run.match_pods(item, wanted)
    current = [one for one in pods if one["metadata"]["labels"].get(REVISION) == revision]
    ready = sum(map(is_ready, pods))
    run.put_status(
        key, item, replicas=len(pods), readyReplicas=ready, scheduledReplicas=len(pods), updatedReplicas=len(current),
        observedGeneration=item["metadata"]["generation"],
    )  # fmt: skip
    former = [one for one in pods if one not in current]
    if former and ready == len(pods) and not _keeps_pods(run, item):
        await run.delete_child(("", "pods"), former[0])


def _keeps_pods(run: "Controllers", item: Object) -> bool:
    owners = item["metadata"].get("ownerReferences") or [{}]
    at = run.api.storage.by_uid(owners[0].get("uid", ""))
    found: Any = run.api.storage.get(*at) if at else None
    strategy = ((found or {}).get("spec") or {}).get("updateStrategy") or {}
    return bool(strategy.get("type") == "OnDelete")


GROVE_WORKLOADS = {CLIQUE_SETS: clique_set, CLIQUES: clique}
