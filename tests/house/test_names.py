"""A class name is unique in src/dynamo, so that it can be searched for."""

import ast
from collections import Counter

from tests.house.test_house import MODULES

SHARED = frozenset(
    {
        "Annotated",
        "Answer",
        "BlockPool",
        "Bucket",
        "CacheEvents",
        "Call",
        "Caller",
        "Choice",
        "Chunks",
        "Client",
        "Connection",
        "Controls",
        "Conversation",
        "Copy",
        "Corrupt",
        "Counts",
        "Delta",
        "End",
        "Envelope",
        "Event",
        "Facts",
        "FinishedChoice",
        "Form",
        "Generation",
        "Handshake",
        "Header",
        "HttpService",
        "Identity",
        "Kind",
        "Lease",
        "Library",
        "Limits",
        "Listener",
        "Load",
        "LoadReporter",
        "MemoryStore",
        "Message",
        "Model",
        "Offer",
        "Outcome",
        "Part",
        "PeerBody",
        "Placement",
        "Plan",
        "Progress",
        "Rank",
        "RankLoad",
        "Refused",
        "RegisterBody",
        "Reply",
        "Request",
        "ResponseStream",
        "Restart",
        "RouterConfig",
        "Row",
        "Sequence",
        "Served",
        "Session",
        "SglangForm",
        "SharedPages",
        "Source",
        "Span",
        "State",
        "StepReporter",
        "Stretch",
        "Tap",
        "Thresholds",
        "Ticket",
        "Tiers",
        "Traffic",
        "UnregisterBody",
        "Waiting",
        "Weights",
        "Worker",
        "_Entry",
        "_Followed",
        "_Model",
    }
)
"""Names that are still used more than once. The list only shrinks."""


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
