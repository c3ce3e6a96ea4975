"""A worker killed, stopped or continued while requests run: with a spare one, no request fails."""

import time
from pathlib import Path

import pytest
from tests.cluster.processes import wait_until
from tests.cluster.worker import WorkerProcess
from tests.integration.faults.injection import CHAT, Freeze, Kill, RequestThread, failures, serving

from dynamo.runtime.discovery.file import EXPIRY_S

pytestmark = pytest.mark.integration

PACED = ("--speedup-ratio", "1")
LONG = 1000  # Tokens: six seconds, within which a worker is killed or stopped on a busy machine too.
DETECTION_S = 2.0
MOVED_S = EXPIRY_S  # From SIGSTOP to the next token from another worker; the registry alone would take longer.
STREAMS = 8


def test_killed_worker_is_removed_within_two_seconds_and_no_request_fails(tmp_path: Path) -> None:
    with serving(tmp_path, "--migration-limit", "3") as cluster:
        workers = [WorkerProcess(cluster, *PACED) for _ in range(2)]
        streams = [RequestThread(cluster, max_tokens=LONG) for _ in range(STREAMS)]
        wait_until(lambda: all(one.has_begun for one in streams), "not all streams began")
        assert all(worker.inflight for worker in workers), "one worker has nothing to lose"

        killed = Kill(workers[0].process)
        late = [RequestThread(cluster, max_tokens=8) for _ in range(STREAMS)]
        assert failures(streams + late) == []
        silence_s = max(one.silence_after_s(killed.at) for one in streams)
        print(f"killed: longest silence {silence_s * 1000:.0f} ms, "
              f"first piece of a new request at most {max(one.received_at_s[0] for one in late) - killed.at:.3f} s later")  # fmt: skip
        assert cluster.metric("dynamo_frontend_model_migration_total", migration_type="ongoing_request") > 0
        assert silence_s < DETECTION_S
        assert all(one.received_at_s[0] - one.begun_at < DETECTION_S for one in late)


def test_briefly_paused_worker_keeps_its_streams(tmp_path: Path) -> None:
    with serving(tmp_path, "--migration-limit", "3") as cluster:
        worker = WorkerProcess(cluster, *PACED)
        stream = RequestThread(cluster, max_tokens=LONG)
        wait_until(lambda: stream.has_begun, "the stream never began")
        frozen = Freeze(worker.process)
        time.sleep(2)
        frozen.verify()
        frozen.thaw()
        assert failures([stream]) == []
        assert stream.silence_s > 1.8, "it was not interrupted"
        assert cluster.metric("dynamo_frontend_model_migration_total") == 0
        assert cluster.post(CHAT).status_code == 200


def test_requests_of_a_paused_worker_migrate_and_others_are_not_delayed(tmp_path: Path) -> None:
    with serving(tmp_path, "--migration-limit", "3") as cluster:
        zombie, spare = (WorkerProcess(cluster, *PACED) for _ in range(2))
        streams = [RequestThread(cluster, max_tokens=LONG) for _ in range(4)]
        wait_until(lambda: all(one.has_begun for one in streams), "not all streams began")
        assert zombie.inflight, "the worker has nothing to lose"

        frozen = Freeze(zombie.process)
        first = [RequestThread(cluster) for _ in range(2)]
        assert failures(first) == []
        # One of them was sent to the stopped worker, and moved to the other one when it did not respond.
        assert max(one.silence_s for one in first) < MOVED_S
        later = [RequestThread(cluster).wait() for _ in range(4)]
        assert failures(later) == []
        assert max(one.silence_s for one in later) < DETECTION_S, "it is still asked"
        frozen.verify()

        assert failures(streams) == []
        frozen.verify()
        silence_s = max(one.silence_s for one in streams)
        print(f"stopped: the streams it had went on after {silence_s:.2f} s")
        assert 1.0 < silence_s < MOVED_S, "its silence was not what they left it for"
        assert cluster.metric("dynamo_frontend_model_migration_total", migration_type="ongoing_request") > 0
        assert cluster.metric("dynamo_transport_tcp_left_silent_total") > 0

        frozen.thaw()
        wait_until(lambda: cluster.workers() == 2, "the worker did not come back")
        wait_until(lambda: zombie.is_idle, "the worker continues an abandoned request")
        requests = "dynamo_component_requests_total"
        before = zombie.metric(requests)
        wait_until(
            lambda: cluster.post(CHAT).status_code == 200 and zombie.metric(requests) > before, "it is never asked"
        )
        assert spare.is_idle


def test_paused_frontend_does_not_treat_its_workers_as_unresponsive(tmp_path: Path) -> None:
    with serving(tmp_path, "--migration-limit", "3") as cluster:
        for _ in range(2):
            WorkerProcess(cluster, *PACED)
        streams = [RequestThread(cluster, max_tokens=LONG) for _ in range(4)]
        wait_until(lambda: all(one.has_begun for one in streams), "not all streams began")
        frozen = Freeze(cluster.frontend)
        time.sleep(4)
        frozen.verify()
        frozen.thaw()
        assert failures(streams) == []
        assert max(one.silence_s for one in streams) > 3.5, "it was not interrupted"
        assert cluster.metric("dynamo_frontend_model_migration_total") == 0
        assert cluster.metric("dynamo_transport_tcp_left_silent_total") == 0


def test_stream_without_migration_waits_for_a_paused_worker(tmp_path: Path) -> None:
    with serving(tmp_path) as cluster:
        workers = [WorkerProcess(cluster, *PACED) for _ in range(2)]
        streams = [RequestThread(cluster, max_tokens=LONG) for _ in range(2)]
        wait_until(lambda: all(one.has_begun for one in streams), "not all streams began")
        assert all(worker.inflight for worker in workers), "one worker has nothing to lose"
        frozen = Freeze(workers[0].process)
        time.sleep(4)
        frozen.verify()
        frozen.thaw()
        assert failures(streams) == []
        assert max(one.silence_s for one in streams) > 3.5, "it was not interrupted"
        assert cluster.metric("dynamo_frontend_model_migration_total") == 0


def test_stream_timeout_ends_requests_of_the_only_worker_when_it_is_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS", "1.5")
    monkeypatch.setenv("DYN_TCP_REQUEST_TIMEOUT", "1")
    with serving(tmp_path) as cluster:
        worker = WorkerProcess(cluster, *PACED)
        stream = RequestThread(cluster, max_tokens=LONG)
        wait_until(lambda: stream.has_begun, "the stream never began")
        frozen = Freeze(worker.process)
        answer = cluster.post(CHAT)
        assert answer.status_code >= 500
        assert answer.json()["error"]["message"]
        stream.wait()
        assert time.monotonic() - frozen.at < 8
        assert 'data: {"error":' in stream.text
        assert stream.text.endswith("data: [DONE]\n\n")
        wait_until(lambda: cluster.metric("dynamo_frontend_inflight_requests") == 0, "a request is left over")
        frozen.verify()
        frozen.thaw()
        wait_until(lambda: worker.is_idle, "the worker continues an abandoned request")
        assert cluster.post(CHAT).status_code == 200
