"""API keys in environment variables and in headers."""

import pytest

from dynamo.core.api_keys import API_KEYS, is_one_of, keys_of_variable, presented_key
from dynamo.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (None, ()),
        ("sk-secret-1", ("sk-secret-1",)),
        (" sk-secret-1 ,sk-secret-2,", ("sk-secret-1", "sk-secret-2")),
        ('["sk-a,b-secret"]', ("sk-a,b-secret",)),
    ],
)
def test_api_keys_variable_holds_a_list_or_a_json_array(text: str | None, keys: tuple[str, ...]) -> None:
    assert keys_of_variable(API_KEYS, {} if text is None else {API_KEYS: text}) == keys


@pytest.mark.parametrize("text", ["", " ", ",", " , ", "[]", '[""]', "[1]", "[", "short"])
def test_api_keys_variable_without_a_usable_key_is_an_error_that_does_not_expose_the_key(text: str) -> None:
    with pytest.raises(ConfigError, match=API_KEYS) as raised:
        keys_of_variable(API_KEYS, {API_KEYS: text})
    assert not text.strip(' ,[]"') or text not in str(raised.value)


def test_api_keys_compare_the_whole_key() -> None:
    assert is_one_of("sk-secret-1", ["sk-secret-2", "sk-secret-1"])
    assert not is_one_of("sk-secret", ["sk-secret-1"]) and not is_one_of(None, ["sk-secret-1"])
    assert presented_key({"authorization": "Bearer sk-secret-1", "x-api-key": "b"}) == "sk-secret-1"
    assert presented_key({"x-api-key": "sk-secret-1"}) == "sk-secret-1"
    assert presented_key({"authorization": "Bearer "}) is None
