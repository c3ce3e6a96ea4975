"""API keys and their permissions."""

import hashlib

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynamo.core.errors import ConfigError, HttpError
from dynamo.http.server.access import ApiCaller, KeyLimits, KeyRing, plain_keys, read_keys

KEY = "sk-secret-1"


def caller(**limits: object) -> ApiCaller:
    return ApiCaller(KeyLimits(name="a", key=KEY, **limits))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", b"Bearer sk-secret-1"),
        (b"authorization", b"bearer  sk-secret-1"),
        (b"x-api-key", b"sk-secret-1"),
    ],
)
def test_key_is_read_from_authorization_or_x_api_key(header: tuple[bytes, bytes]) -> None:
    found = KeyRing(plain_keys([KEY])).find([(b"host", b"x"), header])
    assert found is not None and found.name == "key-1"


@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", b"Bearer sk-secret-2"),
        (b"authorization", b"Basic sk-secret-1"),
        (b"authorization", b"sk-secret-1"),
        (b"x-api-key", b"sk-secret-1 "),
        (b"x-api-key", b""),
        (b"x-api-key", b"\xff\xfe"),
        (b"x-other", b"sk-secret-1"),
    ],
)
def test_wrong_key_or_scheme_is_not_found(header: tuple[bytes, bytes]) -> None:
    assert KeyRing(plain_keys([KEY])).find([header]) is None


def test_key_ring_stores_no_plain_key() -> None:
    ring = KeyRing([KeyLimits(name="a", key_sha256=hashlib.sha256(KEY.encode()).hexdigest())])
    assert ring.find([(b"x-api-key", KEY.encode())]) is not None
    assert all(KEY.encode() not in digest for digest in ring._callers)


def test_requests_over_the_rate_limit_get_a_retry_after() -> None:
    someone = caller(requests_per_minute=2)
    assert someone.admit(0.0) is None
    assert someone.admit(0.0) is None
    reported = someone.admit(1.0)
    assert reported is not None and (reported.limit, reported.retry_after_s) == ("requests_per_minute", 29)
    assert someone.admit(30.0) is None


def test_token_limit_is_charged_after_the_response_and_delays_the_next_request() -> None:
    someone = caller(tokens_per_minute=60)
    assert someone.admit(0.0) is None
    someone.spend(120, 0.0)
    reported = someone.admit(0.0)
    assert reported is not None and reported.limit == "tokens_per_minute"
    assert 60 <= reported.retry_after_s <= 61
    assert someone.admit(61.0) is None


def test_concurrent_request_limit_refuses_further_requests() -> None:
    someone = caller(concurrent_requests=1)
    assert someone.admit(0.0) is None
    assert someone.admit(0.0) is not None
    someone.release()
    assert someone.admit(0.0) is None


def test_refused_request_does_not_consume_limits() -> None:
    someone = caller(requests_per_minute=1, concurrent_requests=1)
    someone.admit(0.0)
    for _ in range(5):
        assert someone.admit(0.0) is not None
    assert someone.concurrent == 1
    someone.release()
    assert someone.admit(60.0) is None


def test_models_are_allowed_by_name_or_pattern() -> None:
    someone = caller(models=("demo", "Qwen/*"))
    someone.require("demo")
    someone.require("Qwen/Qwen3-0.6B")
    with pytest.raises(HttpError, match="may not use the model 'gpt'"):
        someone.require("gpt")
    assert caller().may_use("anything")


def test_changed_limits_apply_at_once_and_keep_previous_usage() -> None:
    ring = KeyRing([KeyLimits(name="a", key=KEY, requests_per_minute=1)])
    header = [(b"x-api-key", KEY.encode())]
    someone = ring.find(header)
    assert someone is not None and someone.admit(0.0) is None
    ring.replace([KeyLimits(name="a", key="sk-secret-2", requests_per_minute=1)])
    assert ring.find(header) is None
    again = ring.find([(b"x-api-key", b"sk-secret-2")])
    assert again is someone and again.concurrent == 1
    assert again.admit(0.0) is not None
    ring.replace([KeyLimits(name="a", key="sk-secret-2")])
    assert again.admit(0.0) is None


def test_owner_of_stored_objects_depends_only_on_the_key() -> None:
    first, second = KeyRing(plain_keys([KEY, "sk-secret-2"])), KeyRing(plain_keys(["sk-secret-2", KEY]))
    header = [(b"x-api-key", KEY.encode())]
    one, other = first.find(header), second.find(header)
    assert one is not None and other is not None and one.name != other.name
    assert one.owner == other.owner and one.owner.startswith("key:")
    assert first.of_owner(one.owner) is one
    hashed = KeyRing([KeyLimits(name="a", key_sha256=hashlib.sha256(KEY.encode()).hexdigest())])
    assert hashed.owner_of("a") == one.owner
    assert hashlib.sha256(KEY.encode()).hexdigest() not in one.owner


def test_key_with_surrounding_spaces_is_refused() -> None:
    for key in (" sk-secret-1", "sk-secret-1 ", " " * 12):
        with pytest.raises(ConfigError, match="spaces"):
            KeyRing([KeyLimits(name="a", key=key)])


def test_duplicate_plain_key_is_one_key_and_may_be_an_admin_key() -> None:
    assert len(KeyRing(plain_keys([KEY, KEY]))) == 1
    (entry,) = plain_keys([KEY], [KEY])
    assert entry.admin


def test_duplicate_keys_are_refused_without_effect() -> None:
    ring = KeyRing(plain_keys([KEY]))
    with pytest.raises(ConfigError, match="duplicate"):
        ring.replace([KeyLimits(name="a", key="sk-secret-2"), KeyLimits(name="b", key="sk-secret-2")])
    assert ring.find([(b"x-api-key", KEY.encode())]) is not None


def test_keys_file_is_read() -> None:
    (entry,) = read_keys('[[keys]]\nname = "a"\nkey = "sk-secret-1"\nmodels = ["m"]\nrequests_per_minute = 3\n', "f")
    assert (entry.name, entry.models, entry.requests_per_minute) == ("a", ("m",), 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[keys]]\nname = "a"\nkey = "sk-secret-1', "not valid TOML"),
        ('[[keys]]\nname = "a"\nkey = "sk-secret-1"\nrpm = 3\n', "rpm"),
        ("[[keys]]\nname = 1\n", "name"),
        ("", "keys"),
    ],
)
def test_keys_file_error_names_the_file_and_hides_the_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_keys(text, "keys.toml")
    assert "keys.toml" in str(caught.value) and KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (KeyLimits(name="a"), "either key or key_sha256"),
        (KeyLimits(name="a", key=KEY, key_sha256="00"), "either key or key_sha256"),
        (KeyLimits(name="a", key="short"), "at least 8"),
        (KeyLimits(name="a", key_sha256="zz"), "64 hexadecimal"),
        (KeyLimits(name="a", key=KEY, tokens_per_minute=0), "tokens_per_minute = 0"),
    ],
)
def test_invalid_key_entry_is_refused(entry: KeyLimits, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KeyRing([entry])


class CallerMachine(RuleBasedStateMachine):
    """A caller's running requests stay within their limit, and waiting for Retry-After suffices, for any sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.caller = caller(requests_per_minute=6, tokens_per_minute=100, concurrent_requests=3)
        self.now = 0.0
        self.running = 0

    @rule(wait=st.floats(0, 20))
    def pass_time(self, wait: float) -> None:
        self.now += wait

    @rule()
    def send_request(self) -> None:
        reported = self.caller.admit(self.now)
        if reported is None:
            self.running += 1
        elif reported.limit != "concurrent_requests":
            self.now += reported.retry_after_s
            again = self.caller.admit(self.now)
            if again is None:
                self.running += 1
            else:
                assert again.limit != reported.limit, "the wait was too short"

    @rule(tokens=st.integers(0, 80))
    def end(self, tokens: int) -> None:
        if self.running:
            self.caller.spend(tokens, self.now)
            self.caller.release()
            self.running -= 1

    @invariant()
    def counts_agree(self) -> None:
        assert self.caller.concurrent == self.running <= 3


TestCallerMachine = CallerMachine.TestCase
