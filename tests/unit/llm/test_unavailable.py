"""Classes whose constructors name what this release does not have."""

import pytest

from dynamo.llm import KvStateAgentHost


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: KvStateAgentHost(None), "run the agent of released Dynamo"),
    ],
)
def test_constructor_names_the_reason(make: object, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        make()  # type: ignore[operator]
