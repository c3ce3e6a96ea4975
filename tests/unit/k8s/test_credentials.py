"""UserCredentials: renewal of token files, passwords, and what is refused. Programs run in tests/integration/kubernetes."""

from pathlib import Path
from typing import Any

import pytest

from dynamo.core.clock import ManualClock
from dynamo.core.errors import ConfigError
from dynamo.k8s.credentials import FILE_S, CredentialsUnavailable, UserCredentials
from dynamo.k8s.kubeconfig import ClusterAccess, ClusterEntry, ExecEntry, UserEntry


def credentials(clock: ManualClock | None = None, **user: Any) -> UserCredentials:
    access = ClusterAccess(cluster=ClusterEntry(server="https://10.0.0.1"), user=UserEntry(**user))
    return UserCredentials(access, clock or ManualClock())


async def test_token_and_password_are_headers() -> None:
    assert (await credentials(token="t").current()).headers == {"authorization": "Bearer t"}
    found = await credentials(username="u", password="p").current()
    assert found.headers == {"authorization": "Basic dTpw"}
    assert (await credentials().current()).headers == {}


async def test_token_file_is_read_again_after_a_minute_and_after_a_refusal(tmp_path: Path) -> None:
    file, clock = tmp_path / "token", ManualClock()
    file.write_text("first\n")
    user = credentials(clock, token_file=str(file))
    first = await user.current()
    assert first.headers == {"authorization": "Bearer first"}
    file.write_text("second")
    assert await user.current() is first
    clock.advance(FILE_S)
    second = await user.current()
    assert second.headers == {"authorization": "Bearer second"}
    file.write_text("third")
    assert user.expire(first), "another request already has the second token"
    assert await user.current() is second
    assert user.expire(second)
    assert (await user.current()).headers == {"authorization": "Bearer third"}
    file.unlink()
    clock.advance(FILE_S)
    with pytest.raises(CredentialsUnavailable, match="No such file"):
        await user.current()


async def test_refused_token_of_a_file_cannot_be_renewed() -> None:
    user = credentials(token="t")
    assert not user.expire(await user.current())


def test_unsupported_credentials_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"exec\.apiVersion v2: must be one of client\.authentication\.k8s\.io/v1,"):
        credentials(exec=ExecEntry(api_version="v2", command="c"))
    with pytest.raises(ConfigError, match="auth-provider is not supported"):
        credentials(auth_provider={"name": "gcp"})
