"""A class name is unique in src/dynamo, so that it can be searched for."""

import ast
from collections import Counter

from tests.house.test_house import MODULES

SHARED = frozenset({"ResponseStream"})
"""Names that are used more than once: upstream's `dynamo.runtime.ResponseStream` and the protocol of serving."""


def repeated() -> set[str]:
    names = Counter(
        node.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    return {name for name, count in names.items() if count > 1}


def test_class_names_are_unique() -> None:
    assert sorted(repeated() - SHARED) == [], "name the class after what it is in its package"


def test_list_of_shared_names_is_shortened_with_them() -> None:
    assert sorted(SHARED - repeated()) == []
