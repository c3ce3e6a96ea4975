"""PolicyProfile: assignment of queued requests to policy classes.

A request names a family (header `x-dynamo-meta-policy-class`) or none; its uncached prompt tokens select a bucket; family and
bucket together select the class. A class without family and bucket is selected by its own name.

    default_policy_family: interactive
    uncached_isl_buckets: [{min_tokens: 0, bucket: short}, {min_tokens: 8192, bucket: long}]
    policy_classes:
      - {name: chat, policy_family: interactive, cache_bucket: short, quantum: 16384}
      - {name: documents, policy_family: interactive, cache_bucket: long, quantum: 4096, prefill_busy_threshold: 30000}
"""

import itertools
from collections.abc import Sequence

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.kv_router.queue import DEFAULT, PolicyClass


class PromptBucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts with at least `min_tokens` uncached tokens."""

    min_tokens: int
    bucket: str


class PolicyProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy classes of one model, or of all models."""

    default_policy_family: str = DEFAULT
    uncached_isl_buckets: Sequence[PromptBucket] = (PromptBucket(0, DEFAULT),)
    policy_classes: Sequence[PolicyClass] = (PolicyClass(),)

    def check(self) -> "PolicyProfile":
        """Return the profile. Raises `ConfigError` for contradictory classes, or if a request could be without a class."""
        buckets = self.uncached_isl_buckets
        if not buckets or buckets[0].min_tokens != 0:
            raise ConfigError("uncached_isl_buckets: must have at least one bucket, the first with min_tokens 0")
        if any(one.min_tokens >= next_.min_tokens for one, next_ in itertools.pairwise(buckets)):
            raise ConfigError("uncached_isl_buckets: min_tokens must increase from bucket to bucket")
        if not self.policy_classes:
            raise ConfigError("policy_classes: must have at least one class")
        names = [one.name for one in self.policy_classes]
        if len(set(names)) < len(names):
            raise ConfigError(f"policy_classes: duplicate name {next(n for n in names if names.count(n) > 1)}")
        known = {one.bucket for one in buckets}
        for one in self.policy_classes:
            one.check()
            if one.cache_bucket is not None and one.cache_bucket not in known:
                raise ConfigError(
                    f"policy class {one.name}: cache_bucket {one.cache_bucket}: must be one of {', '.join(sorted(known))}"
                )
        for bucket in buckets:
            self.class_of(None, bucket.min_tokens)
        return self

    def only_class(self) -> PolicyClass | None:
        """Return the class of every request, whatever it requests; None if there are several."""
        return self.class_of(None, 0) if len(self.policy_classes) == 1 else None

    def class_of(self, requested: str | None, uncached_tokens: int) -> PolicyClass:
        """Return the class of a request. Raises `ConfigError` if the default family has no class for the bucket."""
        bucket = next(one.bucket for one in reversed(self.uncached_isl_buckets) if uncached_tokens >= one.min_tokens)
        for name in (requested, self.default_policy_family):
            if name is None:
                continue
            for one in self.policy_classes:
                if one.policy_family == name and one.cache_bucket in (bucket, None):
                    return one
            for one in self.policy_classes:
                if one.name == name:
                    return one
        raise ConfigError(f"policy_classes: family {self.default_policy_family} has no class for bucket {bucket}")
