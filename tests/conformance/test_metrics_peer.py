"""Metrics of both frontends over the same workers: aggregated, disaggregated and overloaded."""

import concurrent.futures
import sys

import pytest
from benchmarks.corpus import bench_model
from prometheus_client.parser import text_string_to_metric_families
from tests.cluster.peers import OURS, THEIRS, PeerCluster, require_peer
from tools.absent_metrics import ABSENT, ABSENT_WITH_KV_ROUTER, ABSENT_WITHOUT_KV_ROUTER, ABSENT_WITHOUT_REPLICA_SYNC

pytestmark = pytest.mark.conformance

CHAT = "/v1/chat/completions"
REQUESTS = 12
AT_ONCE = 8
CLOSED = ("phase", "worker_type", "policy_class", "reason", "state", "policy", "stage", "operation", "router_mode")
"""Labels whose values have a meaning of their own."""
AGGREGATED, PREFILL, DECODE = (), ("--disaggregation-mode", "prefill"), ("--disaggregation-mode", "decode")
SITUATIONS = {
    "aggregated": (("--router-mode", "kv"), (AGGREGATED, AGGREGATED)),
    "disaggregated": (("--router-mode", "kv"), (PREFILL, DECODE)),
    "disaggregated in turns": (("--router-mode", "round-robin"), (PREFILL, DECODE)),
    "overloaded": (("--router-mode", "kv", "--active-prefill-tokens-threshold", "10"), (AGGREGATED,)),
    "queued": (("--router-mode", "kv", "--router-queue-threshold", "0.01"), (AGGREGATED,)),
}
MORE_VALUES = {
    # Ours observes these of decode and aggregated workers too.
    "dynamo_component_router_non_max_overlap_selections": {"decode"},
    "dynamo_component_router_overlap_blocks_lost": {"decode"},
    "dynamo_frontend_stage_duration_seconds": {"queue", "dispatch"},
    # Decode workers publish KV events too, and ours routes by them.
    "dynamo_component_router_kv_event_source_mismatch_workers": {"decode"},
}
FAILURES = "dynamo_frontend_failures"
"""Also counts requests sent before the frontend discovered its workers."""
OWN_BUCKETS = {"dynamo_frontend_event_loop_delay_seconds"}
OWN_LABELS = {"dynamo_component_uptime_seconds"}
"""The released frontend adds the process's id."""


class Observed:
    """Statuses and metric families of one frontend after the same requests."""

    def __init__(self, cluster, name):
        port = cluster.ports[name]
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            self.statuses = list(pool.map(lambda number: send_request(cluster, port, number), range(REQUESTS)))
        self.text = cluster.request(port, "GET", "/metrics").body.decode()
        self.families = {one.name: one for one in text_string_to_metric_families(self.text)}

    def values(self, name, label):
        """Return the values of a label, of series that the family has."""
        return {one.labels[label] for one in self.families[name].samples if label in one.labels}

    def total(self, name, **labels):
        """Return the sum of the samples of a name with these labels."""
        family = self.families[name.removesuffix("_total").removesuffix("_count")]
        return sum(one.value for one in family.samples if one.name == name and labels.items() <= one.labels.items())


def send_request(cluster, port, number):
    messages = [{"role": "user", "content": f"{number % 3} How many items are there? " * 60}]
    body = {"model": "m", "messages": messages, "max_tokens": 8, "stream": number % 2 == 0}
    return cluster.request(port, "POST", CHAT, body).status


@pytest.fixture(scope="module", params=SITUATIONS)
def situation(request, tmp_path_factory):
    """Return the name of the situation, and the observations of both frontends."""
    require_peer()
    flags, workers = SITUATIONS[request.param]
    with PeerCluster(tmp_path_factory.mktemp("metrics"), *flags) as cluster:
        for role in workers:
            model = ["--model-path", bench_model(), "--model-name", "m", "--speedup-ratio", "1"]
            cluster.run([sys.executable, "-m", "dynamo.mocker", *model, *role])
        cluster.wait_answered(CHAT, {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
        yield request.param, {name: Observed(cluster, name) for name in (OURS, THEIRS)}


def test_every_metric_of_the_released_frontend_exists_or_is_listed_with_its_reason(situation):
    name, observed = situation
    listed = ABSENT | (
        ABSENT_WITHOUT_KV_ROUTER
        if name == "disaggregated in turns"
        else ABSENT_WITH_KV_ROUTER | ABSENT_WITHOUT_REPLICA_SYNC
    )
    assert observed[THEIRS].families.keys() - observed[OURS].families.keys() <= listed.keys()


def test_metrics_of_both_have_the_same_types_labels_and_buckets(situation):
    _, observed = situation
    mine, released = observed[OURS].families, observed[THEIRS].families
    for name in released.keys() & mine.keys() - OWN_LABELS:
        assert mine[name].type == released[name].type, name
        if not (mine[name].samples and released[name].samples):
            continue
        labels = [{label for one in side[name].samples for label in one.labels} for side in (mine, released)]
        assert labels[0] == labels[1], name
        bounds = [
            {float(one.labels["le"]) for one in side[name].samples if "le" in one.labels} for side in (mine, released)
        ]
        assert name in OWN_BUCKETS or sorted(bounds[0]) == pytest.approx(sorted(bounds[1])), name


def test_metrics_of_both_have_the_same_label_values(situation):
    _, observed = situation
    ours, theirs = observed[OURS], observed[THEIRS]
    for name in theirs.families.keys() & ours.families.keys() - {FAILURES}:
        for label in CLOSED:
            mine, released = ours.values(name, label), theirs.values(name, label)
            if mine and released:
                assert mine - MORE_VALUES.get(name, set()) <= released, (name, label)


def test_both_count_the_same_requests(situation):
    name, observed = situation
    ours, theirs = observed[OURS], observed[THEIRS]
    phases = {"phase": "prefill"} if name.startswith("disaggregated") else {"phase": "aggregated"}
    if name == "overloaded":
        assert set(ours.statuses) == set(theirs.statuses) == {200, 529}
        for one in (ours, theirs):
            assert one.total("dynamo_frontend_model_rejection_total") == one.statuses.count(529)
        return
    assert set(ours.statuses) == set(theirs.statuses) == {200}
    for metric in (
        "dynamo_component_router_requests_started_total",
        "dynamo_component_router_requests_total",
        "dynamo_component_router_output_sequence_tokens_count",
        "dynamo_component_router_time_to_first_token_seconds_count",
    ):
        assert ours.total(metric) == theirs.total(metric), metric
    metric = "dynamo_component_router_input_sequence_tokens_count"
    assert ours.total(metric, **phases) == theirs.total(metric, **phases)
    if "dynamo_frontend_router_admission_received" in theirs.families:
        metric = "dynamo_frontend_router_admission_received_total"
        for worker_type in theirs.values(metric.removesuffix("_total"), "worker_type"):
            assert ours.total(metric, worker_type=worker_type) == theirs.total(metric, worker_type=worker_type)
