"""Live planning across implementations: the load scales workers up, its end scales them down, and no request fails."""

import asyncio
from pathlib import Path

import pytest
from tests.cluster.etcd import EtcdCluster
from tests.cluster.peers import OURS, THEIRS
from tests.conformance.live_planning import MODEL, LiveDeployment, require_planner_peer

pytestmark = pytest.mark.conformance


SCALED = ("no_change", "scale_up", "scale_down")


async def load_and_end(made: LiveDeployment, frontend: str) -> None:
    """Load the deployment until it has three workers, and wait until it has one again."""
    await made.until(lambda: made.models(frontend) == {MODEL}, "the frontend does not list the model")
    await made.until(lambda: "no_change" in made.reasons, "the planner has not observed the worker")

    async def until_three() -> None:
        await made.until(lambda: 3 in made.carried_out(), "it did not scale up to three workers")
        await asyncio.sleep(1.0)  # Requests reach the last worker, too.

    found = await made.under_load(until_three)
    await made.until(lambda: made.carried_out()[-1:] == [1], "it did not scale down to one worker")
    assert set(found.statuses) == {200}, found.failures[:5]
    assert len(found.statuses) > 40


@pytest.mark.parametrize(
    ("deployment", "planner", "supervisor"),
    [(THEIRS, OURS, THEIRS), (THEIRS, OURS, OURS), (OURS, THEIRS, OURS), (OURS, THEIRS, THEIRS)],
    ids=lambda one: one,
)
def test_load_scales_up_and_its_end_scales_down_without_a_failed_request(
    tmp_path: Path, deployment: str, planner: str, supervisor: str
) -> None:
    require_planner_peer()
    (tmp_path / "etcd").mkdir()
    with (
        EtcdCluster(tmp_path / "etcd") as etcd,
        LiveDeployment(
            tmp_path, etcd.wait(), frontend=deployment, workers=deployment, supervisor=supervisor, planner=planner
        ) as made,
    ):
        asyncio.run(load_and_end(made, deployment))
        assert made.carried_out() == [2, 3, 2, 1]
        assert {"scale_up", "scale_down"} <= set(made.reasons), made.reasons
        assert set(made.reasons) <= {
            "unset", "no_fpm_data", "no_change", "scale_up", "scale_down", "gpu_budget_guard_hold", "scaling_in_progress", "worker_count_mismatch",
        }, made.reasons  # fmt: skip


def test_advisory_planner_gives_the_reasons_of_the_released_one_and_never_scales(tmp_path: Path) -> None:
    require_planner_peer()
    (tmp_path / "etcd").mkdir()
    with (
        EtcdCluster(tmp_path / "etcd") as etcd,
        LiveDeployment(tmp_path, etcd.wait(), frontend=OURS, workers=OURS, supervisor=THEIRS, planner=THEIRS) as made,
    ):
        made.advise(OURS)
        asyncio.run(load_and_end(made, OURS))
        assert made.carried_out() == [2, 3, 2, 1]  # Those of the released one alone.
        # Its ticks fall between those of the other planner, which may have acted on the same observations already.
        advised = {one for one in made.advised if one in SCALED}
        assert advised - {"no_change"} and advised <= {one for one in made.reasons if one in SCALED}
        assert "advisory" in (tmp_path / "advisory.log").read_text()
