"""Announcement: the text that `dynamo serve` prints when it is ready: address, example command, limits. Pure."""

import enum
import json
import shlex
from dataclasses import dataclass
from typing import Any

from dynamo.core.hosts import is_loopback
from dynamo.ops.graphs import DEFAULT_URL

DEMO_TRUTH = (
    "This is the bundled demo model: tiny, trained only on questions about this project, small sums and a few tricks.\n"
    "It shows that the installation works; for real answers, serve a real checkpoint: {command} serve DIR"
)
MOCKER_NOTICE = "The mocker computes nothing: it generates random tokens at the pace of a real engine."
OPEN_WARNING = "Warning: every host that reaches {host} can use it; require a key with --api-key or DYN_API_KEYS."
MOCKER_MAX_TOKENS = 64  # The mocker refuses requests without a limit of output tokens.


class Api(enum.Enum):
    """The route of the example request for a model; the value is its path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
    CLASSIFY = "/v1/classify"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """Facts about a running graph, and the text for its user."""

    engine: str
    workers: int
    is_demo: bool
    host: str
    """The address that the frontend listens on."""
    port: int
    command: str
    """The command line that starts `dynamo` in the user's shell."""
    is_tls: bool = False
    prefill_workers: int = 0
    needs_key: bool = False
    api: Api = Api.CHAT

    @property
    def url(self) -> str:
        """Return the URL for clients on this machine."""
        return f"{'https' if self.is_tls else 'http'}://{reachable(self.host)}:{self.port}"

    def ready(self, model: str, seconds: float) -> str:
        """Return the text for the model's served name."""
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        if self.prefill_workers:
            workers += f" and {self.prefill_workers} for prompts"
        parts = [f"Ready in {seconds:.1f} s: {model} ({self.engine}, {workers}) at {self.url}"]
        if self.engine == "mocker":
            parts.append(MOCKER_NOTICE)
        elif self.is_demo:
            parts.append(DEMO_TRUTH.format(command=self.command))
        if not self.needs_key and not is_loopback(self.host):
            parts.append(OPEN_WARNING.format(host=self.host))
        parts.append(f"Try it:\n{self.curl(model)}")
        chat = f"or talk to it: {self.chat()}\n" if self.api is Api.CHAT else ""
        parts.append(f"{chat}API reference: {self.url}/docs (listening on {self.address})\nPress Ctrl-C to stop.")
        return "\n\n".join(parts)

    @property
    def address(self) -> str:
        """Return the address and port that the frontend listens on."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def curl(self, model: str) -> str:
        """Return one line that shows an answer when pasted into a shell."""
        body = {"model": model, **self._fields()}
        key = ' -H "Authorization: Bearer $DYN_API_KEY"' if self.needs_key else ""
        # A certificate is rarely issued for localhost.
        flags = "-kN" if self.is_tls else "-N"
        return (
            f"curl {flags} {self.url}{self.api.value} -H 'Content-Type: application/json'{key} "
            f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
        )

    def _fields(self) -> dict[str, Any]:
        if self.api in {Api.EMBEDDINGS, Api.CLASSIFY}:
            return {"input": "What is Dynamo?"}
        if self.api is Api.CHAT:
            fields: dict[str, Any] = {"messages": [{"role": "user", "content": "What is Dynamo?"}], "stream": True}
        else:
            fields = {"prompt": "Dynamo is", "stream": True}
        if self.engine == "mocker":
            fields["max_tokens"] = MOCKER_MAX_TOKENS
        return fields

    def chat(self) -> str:
        """Return the command that opens a conversation."""
        words = [self.command, "chat"]
        if self.url != DEFAULT_URL:
            words += ["--url", self.url]
        if self.engine == "mocker":
            words += ["--max-tokens", str(MOCKER_MAX_TOKENS)]
        return " ".join(words)


def reachable(host: str) -> str:
    """Return the host name under which a client on this machine reaches a server that listens on `host`."""
    if host in {"0.0.0.0", "::", "127.0.0.1", "::1", "localhost", ""}:  # noqa: S104  Compared, not bound.
        return "localhost"
    return f"[{host}]" if ":" in host else host
