"""Container that publishes the profiler's output: its environment, and its access without the pod's token."""

import msgspec

from dynamo.operator.reconcile.requests.copier import PROGRAM, copier_container, give_account
from dynamo.protocols.kubernetes.common import KubeObject


def test_name_and_owner_of_the_output_are_in_the_environment() -> None:
    metadata = {"labels": {"a": "b"}, "ownerReferences": [{"uid": "u"}]}
    container = copier_container("dgdr-output-chat", "space", metadata)
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert (env["OUTPUT_NAME"], env["DGDR_NAMESPACE"]) == ("dgdr-output-chat", "space")
    assert msgspec.json.decode(env["OUTPUT_METADATA"]) == {"metadata": metadata}
    assert all(f'["{name}"]' in PROGRAM for name in env)


def test_copier_program_imports_nothing_from_the_package() -> None:
    assert copier_container("o", "n", {})["args"] == [PROGRAM]
    assert "dynamo" not in "".join(line for line in PROGRAM.splitlines() if line.startswith(("import ", "from ")))


def test_the_output_is_mounted_read_only() -> None:
    mounts = copier_container("o", "n", {})["volumeMounts"]
    assert mounts == [{"name": "profiling-output", "mountPath": "/data", "readOnly": True}]


def test_copier_mounts_a_token_only_in_a_pod_without_one() -> None:
    pod: KubeObject = {
        "volumes": [],
        "containers": [{"name": "profiler", "volumeMounts": []}, copier_container("o", "n", {})],
    }
    give_account(pod)
    assert pod["volumes"] == []
    pod["automountServiceAccountToken"] = False
    give_account(pod)
    assert len(pod["volumes"][0]["projected"]["sources"]) == 3
    assert pod["containers"][0]["volumeMounts"] == []
    assert pod["containers"][1]["volumeMounts"][1]["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount"
