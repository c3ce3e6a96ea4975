"""Signature: AWS Signature Version 4 for requests to S3 and compatible stores. Pure."""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

ALGORITHM = "AWS4-HMAC-SHA256"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of requests; without a key, requests are not signed."""

    access_key: str = ""
    secret_key: str = ""
    region: str = "us-east-1"
    session_token: str = ""
    """Session token of temporary keys."""


def signed(
    method: str,
    path: str,
    headers: Mapping[str, str],
    payload_sha256: str,
    credentials: Credentials,
    stamp: str,
    service: str = "s3",
) -> dict[str, str]:
    """Return the headers (`host` among them) with the signature; `stamp` is the time, as `20130524T000000Z`."""
    full = {name.lower(): value.strip() for name, value in headers.items()}
    full |= {"x-amz-date": stamp, "x-amz-content-sha256": payload_sha256}
    if not credentials.access_key:
        return full
    if credentials.session_token:
        full["x-amz-security-token"] = credentials.session_token
    names = ";".join(sorted(full))
    canonical = "\n".join(
        [
            method,
            quote(path, safe="/-_.~"),
            "",
            *(f"{name}:{full[name]}" for name in sorted(full)),
            "",
            names,
            payload_sha256,
        ]
    )
    scope = f"{stamp[:8]}/{credentials.region}/{service}/aws4_request"
    text = "\n".join([ALGORITHM, stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{credentials.secret_key}".encode()
    for part in (stamp[:8], credentials.region, service, "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    full["authorization"] = (
        f"{ALGORITHM} Credential={credentials.access_key}/{scope},SignedHeaders={names},Signature={signature}"
    )
    return full
