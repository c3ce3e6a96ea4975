"""Container of the profiling pod that publishes the profiler's progress and result in a ConfigMap."""

import inspect

import msgspec

from dynamo.operator import output_copier
from dynamo.protocols.kubernetes.common import KubeObject

NAME = "output-copier"
OUTPUT_PATH = "/data"
OUTPUT_VOLUME = "profiling-output"
ACCOUNT_VOLUME = "output-copier-account"
ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
TOKEN_EXPIRES_S = 3600
PROGRAM = inspect.getsource(output_copier)
"""Program of the container. It is passed on the command line, so that any image with Python and PyYAML runs it."""


def copier_container(output_name: str, namespace: str, metadata: KubeObject) -> KubeObject:
    """Return the container without its image. `metadata` has labels, annotations and owner of the ConfigMap."""
    values = {
        "OUTPUT_PATH": OUTPUT_PATH,
        "OUTPUT_NAME": output_name,
        "OUTPUT_METADATA": msgspec.json.encode({"metadata": metadata}, order="deterministic").decode(),
        "DGDR_NAMESPACE": namespace,
        "ACCOUNT_PATH": ACCOUNT_PATH,
    }
    env: list[KubeObject] = [{"name": name, "value": value} for name, value in values.items()]
    env.append({"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
    return {
        "name": NAME,
        "command": ["python3", "-c"],
        "args": [PROGRAM],
        "env": env,
        "volumeMounts": [{"name": OUTPUT_VOLUME, "mountPath": OUTPUT_PATH, "readOnly": True}],
    }


def give_account(pod: KubeObject) -> None:
    """Mount the account's token into the container alone, where the pod has none."""
    if pod.get("automountServiceAccountToken") is not False:
        return
    sources = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_EXPIRES_S}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
    ]
    pod["volumes"].append({"name": ACCOUNT_VOLUME, "projected": {"sources": sources}})
    copier = next(one for one in pod["containers"] if one["name"] == NAME)
    copier["volumeMounts"].append({"name": ACCOUNT_VOLUME, "mountPath": ACCOUNT_PATH, "readOnly": True})
