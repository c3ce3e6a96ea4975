"""Sidecar of the profiler: it publishes progress and result in a ConfigMap."""

import msgspec

from dynamo.protocols.kubernetes.common import KubeObject

NAME = "output-copier"
OUTPUT_PATH = "/data"
OUTPUT_VOLUME = "profiling-output"
ACCOUNT_VOLUME = "output-copier-account"
ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
TOKEN_EXPIRES_S = 3600
SCRIPT = """\
set -eu
cd "$OUTPUT_PATH"
field() { sed -n "s/^$1: *//p" profiler_status.yaml 2>/dev/null | head -n 1 | tr -d "\\"'"; }
publish() {
  kubectl create configmap "$OUTPUT_NAME" --namespace "$DGDR_NAMESPACE" --dry-run=client -o yaml \\
    --from-literal=phase="$(field phase)" --from-literal=message="$(field message)" "$@" |
    kubectl patch --local -f - --type merge -p "$OUTPUT_METADATA" -o yaml |
    kubectl apply --server-side --force-conflicts -f -
}
exit_code() {
  kubectl get pod "$POD_NAME" --namespace "$DGDR_NAMESPACE" \\
    -o "jsonpath={.status.containerStatuses[?(@.name=='profiler')].state.terminated.exitCode}"
}
last=
while [ -z "$(exit_code)" ]; do
  phase=$(field phase)
  if [ -n "$phase" ] && [ "$phase" != "$last" ] && publish; then last=$phase; fi
  sleep 10
done
set --
for file in final_config.yaml profiler_status.yaml webui_data.json; do
  if [ -f "$file" ]; then set -- "$@" --from-file="$file"; fi
done
publish "$@"
if [ "$(field status)" != success ]; then
  echo "profiler status: $(field status): $(field error) $(field message)" >&2
  exit 1
fi
"""


def copier_container(image: str, output_name: str, namespace: str, metadata: KubeObject) -> KubeObject:
    """Return the container. `metadata` has the labels and the owner of the ConfigMap."""
    values = {
        "OUTPUT_PATH": OUTPUT_PATH,
        "OUTPUT_NAME": output_name,
        "OUTPUT_METADATA": msgspec.json.encode({"metadata": metadata}, order="deterministic").decode(),
        "DGDR_NAMESPACE": namespace,
    }
    env: list[KubeObject] = [{"name": name, "value": value} for name, value in values.items()]
    env.append({"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
    return {
        "name": NAME,
        "image": image,
        "command": ["/bin/sh", "-c"],
        "args": [SCRIPT],
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
