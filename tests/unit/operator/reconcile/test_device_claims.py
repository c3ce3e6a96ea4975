"""Claims of a component's main container. Their GPUs are tested with the reads, in `tests/unit/operator`."""

import pytest
from tests.unit.operator.reconcile.worlds import worker

from dynamo.operator.reconcile.device_claims import ClaimUse, claims_of
from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec


def claiming(*names: str) -> ComponentSpec:
    component = worker("vllm", gpus=0)
    assert component.pod_template is not None
    spec = component.pod_template["spec"]
    spec["resourceClaims"] = [{"name": "a", "resourceClaimTemplateName": "t"}, {"name": "b", "resourceClaimName": "c"}]
    spec["containers"][0]["resources"] = {"claims": [{"name": one} for one in names]}
    return component


def test_claims_are_listed_once_with_their_objects() -> None:
    assert claims_of(claiming("a", "b", "a")) == [
        ClaimUse("ResourceClaimTemplate", "t", ""),
        ClaimUse("ResourceClaim", "c", ""),
    ]


def test_claim_that_the_pod_does_not_have_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"resources\.claims: x is not among the resourceClaims of the pod"):
        claims_of(claiming("x"))
