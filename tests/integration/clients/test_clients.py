"""Clients as their users install them: each runs a script over its whole API in its own environment."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until
from tests.integration.clients import environments
from tests.integration.clients.surface import DEMO, EMBEDDER, GOOD_KEY, NARROW_KEY

pytestmark = pytest.mark.integration

HERE = Path(__file__).parent
DEADLINE_S = 300.0
SLOW_KEYS = 40  # A client's script uses one, and a rerun of the test another.


def in_its_own(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(environments.why_not(name) is not None, reason=str(environments.why_not(name)))


@dataclass
class ClientTargets:
    """Servers: a scripted model, a real one, one of embeddings, and a second frontend that requires keys."""

    cluster: Cluster
    keyed: Cluster
    slow_keys: Iterator[str]

    def run(self, *command: str) -> str:
        """Run a client's script to its end. Raises with all of its output."""
        places = (f"http://127.0.0.1:{self.cluster.port}", f"http://127.0.0.1:{self.keyed.port}", next(self.slow_keys))
        return finished([*command, *places])


def finished(command: Sequence[str]) -> str:
    """Return the output of a process that succeeded."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S, check=False)  # fmt: skip
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-10_000:]}"
    print(done.stdout)
    return done.stdout


def keys() -> str:
    """Write a file of keys: one without limits, one without these models, some with one request a minute."""
    entries = [f'name = "good"\nkey = "{GOOD_KEY}"', f'name = "narrow"\nkey = "{NARROW_KEY}"\nmodels = ["others*"]']
    entries += [
        f'name = "slow{number}"\nkey = "key-slow-{number}"\nrequests_per_minute = 1' for number in range(SLOW_KEYS)
    ]
    return "".join(f"[[keys]]\n{entry}\n" for entry in entries)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientTargets]:
    folder = tmp_path_factory.mktemp("clients")
    (folder / "keys.toml").write_text(keys())
    cluster = Cluster(folder, "--enable-anthropic-api", "--batch-dir", str(folder / "batches"))
    keyed = None
    try:
        cluster.scripted_worker()
        cluster.run("cpu", "--model-name", DEMO)
        cluster.run("cpu", "--model-name", EMBEDDER, "--embedding-worker")
        keyed = Cluster(folder, "--enable-anthropic-api", "--api-keys-file", str(folder / "keys.toml"))
        wait_until(lambda: cluster.workers() == 3 == keyed.workers(), "not all workers were seen")
        yield ClientTargets(cluster, keyed, (f"key-slow-{number}" for number in range(SLOW_KEYS)))
    finally:
        if keyed is not None:
            keyed.stop()
        cluster.stop()


@pytest.mark.parametrize("script", ["openai_surface.py", "anthropic_surface.py"])
def test_client_script_of_the_test_environment_passes(targets: ClientTargets, script: str) -> None:
    output = targets.run(sys.executable, str(HERE / script))
    assert "0 failed" in output


@pytest.mark.clients
@pytest.mark.parametrize(
    ("name", "script"),
    [
        pytest.param("openai-2", "openai_surface.py", marks=in_its_own("openai-2")),
        pytest.param("openai-3", "openai_surface.py", marks=in_its_own("openai-3")),
        pytest.param("langchain", "langchain_surface.py", marks=in_its_own("langchain")),
        pytest.param("litellm", "litellm_surface.py", marks=in_its_own("litellm")),
        pytest.param("lm-eval", "lm_eval_surface.py", marks=in_its_own("lm-eval")),
    ],
)
def test_client_script_of_a_separate_environment_passes(targets: ClientTargets, name: str, script: str) -> None:
    output = targets.run(str(environments.python_of(name)), str(HERE / script))
    assert "0 failed" in output


@pytest.mark.clients
@in_its_own("node")
def test_node_client_script_passes(targets: ClientTargets) -> None:
    output = targets.run("node", str(HERE / "openai_surface.mjs"), str(environments.HOME / "node"))
    assert "0 failed" in output
