"""Authorization of the API server of tests by RBAC: roles, bindings, and what each account used."""

from collections.abc import Iterator

from tests.cluster.kubernetes.errors import ApiError, Object
from tests.cluster.kubernetes.resources import Resource
from tests.cluster.kubernetes.storage import Storage

GROUP = "rbac.authorization.k8s.io"
MASTERS = "system:masters"
ACCOUNTS = "system:serviceaccounts"
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def account_user(namespace: str, name: str) -> list[str]:
    """Return the user name and groups of a service account."""
    return [f"system:serviceaccount:{namespace}:{name}", ACCOUNTS, f"{ACCOUNTS}:{namespace}"]


def verb_of(method: str, *, is_named: bool, is_watch: bool) -> str:
    """Return the verb of a request."""
    if method == "GET":
        return "get" if is_named else "watch" if is_watch else "list"
    if method == "DELETE" and not is_named:
        return "deletecollection"
    return VERBS.get(method, method.lower())


class Authorizer:
    """Decides by the stored roles and bindings."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.used: set[tuple[str, str, str, str]] = set()
        """User, API group, resource and verb of each request that a role allowed."""
        self.refused: list[tuple[str, str, str, str]] = []

    def check(self, user: Object, resource: Resource, subresource: str, namespace: str, name: str, verb: str) -> None:
        """Raise 403 unless a role allows the request."""
        if MASTERS in user["groups"]:
            return
        group, plural = resource.key
        wanted = f"{plural}/{subresource}" if subresource else plural
        cell = user["username"], group, wanted, verb
        if any(_allows(rule, group, wanted, name, verb) for rule in self._rules(user, namespace)):
            self.used.add(cell)
            return
        self.refused.append(cell)
        where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
        at = f'resource "{wanted}" in API group "{group}"{where}'
        raise ApiError(403, f'{wanted} is forbidden: User "{user["username"]}" cannot {verb} {at}', "Forbidden")

    def _rules(self, user: Object, namespace: str) -> Iterator[Object]:
        bindings = [(one, "") for one in self._storage.items((GROUP, "clusterrolebindings"))]
        if namespace:
            bindings += [(one, namespace) for one in self._storage.items((GROUP, "rolebindings"), namespace)]
        for binding, where in bindings:
            if any(_is(subject, user, where) for subject in binding.get("subjects") or []):
                reference = binding["roleRef"]
                is_cluster = reference["kind"] == "ClusterRole"
                key = (GROUP, "clusterroles" if is_cluster else "roles")
                role = self._storage.get(key, ("" if is_cluster else where, reference["name"]))
                yield from (role or {}).get("rules") or []


def _is(subject: Object, user: Object, namespace: str) -> bool:
    if subject["kind"] == "ServiceAccount":
        at = subject.get("namespace") or namespace
        return bool(user["username"] == f"system:serviceaccount:{at}:{subject['name']}")
    return subject["name"] in ([user["username"]] if subject["kind"] == "User" else user["groups"])


def _allows(rule: Object, group: str, resource: str, name: str, verb: str) -> bool:
    names = rule.get("resourceNames") or []
    return (
        bool({group, "*"} & set(rule.get("apiGroups") or []))
        and bool({resource, "*"} & set(rule.get("resources") or []))
        and bool({verb, "*"} & set(rule.get("verbs") or []))
        and (not names or name in names)
    )
