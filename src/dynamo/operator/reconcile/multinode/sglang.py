"""SGLang over several nodes: each node runs the same program with its rank."""

from dynamo.operator.reconcile.multinode.commands import CommandLine, OptionWord
from dynamo.operator.reconcile.multinode.nodes import NodeGroup

MODULE = "sglang"
INIT_PORT = 29500


def leader_command(command: CommandLine, group: NodeGroup) -> CommandLine:
    """Return the command of rank 0."""
    return command.with_options([*_options(group), "0"], MODULE)


def worker_command(command: CommandLine, group: NodeGroup) -> CommandLine:
    """Return the command of the other ranks."""
    return command.with_options([*_options(group), group.rank], MODULE)


def _options(group: NodeGroup) -> list[OptionWord]:
    return ["--dist-init-addr", f"{group.leader}:{INIT_PORT}", "--nnodes", str(group.size), "--node-rank"]
