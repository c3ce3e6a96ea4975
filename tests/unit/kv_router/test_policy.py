"""A request's class follows from its fields and from its number of uncached tokens."""

import pytest

from dynamo.core.errors import ConfigError
from dynamo.kv_router.policy import PolicyProfile, PromptBucket
from dynamo.kv_router.queue import PolicyClass

PROFILE = PolicyProfile(
    default_policy_family="interactive",
    uncached_isl_buckets=[PromptBucket(0, "short"), PromptBucket(100, "long")],
    policy_classes=[
        PolicyClass(name="chat", policy_family="interactive", cache_bucket="short"),
        PolicyClass(name="documents", policy_family="interactive", cache_bucket="long"),
        PolicyClass(name="nightly", policy_family="batch"),
        PolicyClass(name="vip", policy_family="unknown"),
    ],
)


@pytest.mark.parametrize(
    ("requested", "uncached", "expected"),
    [
        (None, 0, "chat"),
        (None, 99, "chat"),
        (None, 100, "documents"),
        ("interactive", 500, "documents"),
        ("batch", 500, "nightly"),
        ("vip", 0, "vip"),
        ("unheard of", 0, "chat"),
    ],
)
def test_policy_selects_the_class_by_family_and_bucket(requested: str | None, uncached: int, expected: str) -> None:
    assert PROFILE.check().class_of(requested, uncached).name == expected


def test_policy_without_a_file_has_one_class() -> None:
    assert PolicyProfile().check().class_of("anything", 10**6).name == "default"


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (PolicyProfile(uncached_isl_buckets=[PromptBucket(5, "a")]), "min_tokens 0"),
        (PolicyProfile(uncached_isl_buckets=[PromptBucket(0, "a"), PromptBucket(0, "b")]), "must increase"),
        (PolicyProfile(policy_classes=[]), "at least one"),
        (PolicyProfile(policy_classes=[PolicyClass(), PolicyClass()]), "duplicate name default"),
        (PolicyProfile(policy_classes=[PolicyClass(cache_bucket="x")]), "cache_bucket x"),
        (PolicyProfile(default_policy_family="unknown"), "family unknown has no class"),
    ],
)
def test_policy_refuses_profiles_without_a_class_for_every_request(profile: PolicyProfile, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profile.check()
