"""Write the generated parts of the Helm charts: resource definitions, the operator's rules and webhooks.

python -m tools.charts [--check]
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from tools.crds import PlainDumper
from tools.pages import ROOT, write

from dynamo import __version__
from dynamo.operator import permissions
from dynamo.operator.webhook_configurations import WebhookAddress, configurations
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.crds import CONVERSION_NAMESPACE, CONVERSION_SERVICE, manifests

CHARTS = ROOT / "deploy" / "helm" / "charts"
HEAD = "# Written by tools/charts.py; `make references` updates it.\n"
KEEP = """\
  {{- if .Values.keepOnUninstall }}
  annotations:
    helm.sh/resource-policy: keep
  {{- end }}
"""


def text_of(value: object) -> str:
    """Return YAML without anchors."""
    return yaml.dump(value, Dumper=PlainDumper, sort_keys=False, width=120)


def definition(crd: KubeObject) -> str:
    """Return a resource definition as a template."""
    crd["metadata"]["labels"] = {**crd["metadata"].get("labels", {}), "app.kubernetes.io/version": "@VERSION@"}
    webhook = (crd["spec"].get("conversion") or {}).get("webhook")
    if webhook is not None:
        webhook["clientConfig"]["service"] |= {"namespace": "@NAMESPACE@", "name": "@SERVICE@"}
    # Text of a description that the template engine would read as an action.
    text = re.sub(r"\{\{|\}\}", lambda found: f'{{{{ "{found[0]}" }}}}', text_of(crd))
    text = text.replace("@VERSION@", "{{ .Chart.AppVersion | quote }}").replace("'{{", "{{").replace("}}'", "}}")
    text = text.replace("@NAMESPACE@", "{{ .Values.conversion.namespace }}")
    text = text.replace("@SERVICE@", "{{ .Values.conversion.service }}")
    return text.replace("metadata:\n", f"metadata:\n{KEEP}", 1)


FREE = frozenset({"limits", "requests", "nodeSelector", "affinity", "annotations"})
"""Objects of Kubernetes, which the API server checks."""
CHOICES = {"discoveryBackend": ["kubernetes", "etcd"], "pullPolicy": ["Always", "IfNotPresent", "Never"]}
MINIMA = {"replicas": 1, "maxPayload": 1}
ITEMS = {
    "args": {"type": "string"},
    "imagePullSecrets": {"type": "string", "minLength": 1},
    "tolerations": {"type": "object"},
}


def schema_of(name: str, value: object) -> dict[str, object]:
    """Return the JSON schema of a value of `values.yaml`, whose default has its type."""
    match value:
        case dict() if name in FREE:
            return {"type": "object"}
        case dict():
            properties = {key: schema_of(key, one) for key, one in value.items()}
            return {"type": "object", "additionalProperties": False, "properties": properties}
        case list():
            return {"type": "array", "items": ITEMS[name]}
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer", "minimum": MINIMA[name]}
        case _ if name in CHOICES:
            return {"type": "string", "enum": CHOICES[name]}
        case _:
            return {"type": "string"}


def contents() -> dict[Path, str]:
    """Return the content of every file."""
    templates = CHARTS / "dynamo-crds" / "templates"
    found = {templates / name: HEAD + definition(crd) for name, crd in manifests()}
    rules = {
        "graph": permissions.rules_of(permissions.GRAPH_RULES),
        "workload": permissions.rules_of(permissions.WORKLOAD_RULES),
        "cluster": permissions.rules_of(permissions.CLUSTER_RULES),
        "gpuDiscovery": permissions.rules_of(permissions.GPU_DISCOVERY_RULES),
        "election": permissions.rules_of(permissions.ELECTION_RULES),
    }
    hooks = configurations(WebhookAddress(CONVERSION_SERVICE, CONVERSION_NAMESPACE), "")
    for one in hooks:
        for hook in one["webhooks"]:
            del hook["clientConfig"]["caBundle"]
    files = CHARTS / "dynamo-platform" / "files"
    found[files / "operator-rules.yaml"] = HEAD + text_of(rules)
    found[files / "webhooks.yaml"] = HEAD + text_of({"items": hooks})
    for chart in ("dynamo-crds", "dynamo-platform"):
        values = yaml.safe_load((CHARTS / chart / "values.yaml").read_text())
        schema: dict[str, Any] = {
            "$schema": "https://json-schema.org/draft-07/schema#",
            **schema_of("", {"global": {}, **values}),
        }
        if "global" not in values:  # A parent chart passes its own.
            schema["properties"]["global"] = {"type": "object"}
        found[CHARTS / chart / "values.schema.json"] = json.dumps(schema, indent=2) + "\n"
        path = CHARTS / chart / "Chart.yaml"
        versioned = re.sub(r"^((?:appV|v)ersion): .*$", rf"\1: {__version__}", path.read_text(), flags=re.MULTILINE)
        found[path] = versioned
    return found


def main() -> int:
    """Write the files; return 1 with `--check` if one is out of date."""
    return max(write(path, content) for path, content in contents().items())


if __name__ == "__main__":
    sys.exit(main())
