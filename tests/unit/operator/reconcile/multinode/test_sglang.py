"""Commands of SGLang over several nodes."""

from dynamo.operator.reconcile.multinode.commands import CommandLine
from dynamo.operator.reconcile.multinode.nodes import grove_nodes, leader_worker_set_nodes
from dynamo.operator.reconcile.multinode.sglang import leader_command, worker_command

PYTHON = ("python3", "-m", "dynamo.sglang")
LINE = CommandLine.of({"command": list(PYTHON), "args": ["--tp", "16"]})


def test_ranks_of_a_leader_worker_set() -> None:
    group = leader_worker_set_nodes(2)
    added = ("--dist-init-addr", "$(LWS_LEADER_ADDRESS):29500", "--nnodes", "2", "--node-rank")
    assert leader_command(LINE, group).words == (*LINE.words, *added, "0")
    assert worker_command(LINE, group).words == (*LINE.words, *added, "$(LWS_WORKER_INDEX)")


def test_rank_of_a_scaling_group_is_computed_by_a_shell() -> None:
    words = worker_command(LINE, grove_nodes("Decode", 3)).words
    address = "$(GROVE_PCSG_NAME)-$(GROVE_PCSG_INDEX)-decode-ldr-0.$(GROVE_HEADLESS_SERVICE):29500"
    assert words[:2] == ("sh", "-c")
    assert words[2] == (
        f"exec python3 -m dynamo.sglang --tp 16 --dist-init-addr {address} --nnodes 3 "
        "--node-rank $((GROVE_PCLQ_POD_INDEX + 1))"
    )
