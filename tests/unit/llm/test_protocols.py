"""Types of objects that are passed to callbacks."""

import pytest

from dynamo._core import ResponseSender
from dynamo.llm import RoutedEngine


@pytest.mark.parametrize("kind", [RoutedEngine, ResponseSender])
def test_types_of_passed_objects_are_not_constructed(kind: type) -> None:
    with pytest.raises(TypeError, match="Protocol"):
        kind()
