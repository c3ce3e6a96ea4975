"""A class name is unique in src/dynamo, so that it can be searched for."""

import ast
from collections import Counter
from functools import cache

from tests.house.source import MODULES, tree

SHARED = frozenset(
    {
        "Descriptor",
        "DisaggregationMode",
        "EngineConfig",
        "EngineMetrics",
        "ForwardPassMetrics",
        "FrontendConfig",
        "HttpClient",
        "HttpError",
        "LLMEngine",
        "LlmRegistration",
        "MediaFetcher",
        "Remote",
        "ResponseStream",
        "RuntimeConfig",
        "Worker",
        "WorkerConfig",
    }
)
"""Names used twice: upstream's, in `dynamo.runtime`, `dynamo.llm`, `dynamo.common`, `dynamo.nixl_connect` and
`dynamo.frontend.frontend_args`, and classes of ours."""


@cache
def repeated() -> set[str]:
    names = Counter(node.name for path in MODULES for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef))
    return {name for name, count in names.items() if count > 1}


def test_class_names_are_unique() -> None:
    assert sorted(repeated() - SHARED) == [], "name the class after what it is in its package"


def test_list_of_shared_names_is_shortened_with_them() -> None:
    assert sorted(SHARED - repeated()) == []
