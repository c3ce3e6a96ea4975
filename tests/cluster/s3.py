"""A real S3 server, moto's, that verifies the signature of every request against the access keys of its users."""

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import boto3
import httpx
from benchmarks.ports import free_port
from botocore.client import Config
from tests.cluster.processes import ProcessGroup

REGION = "eu-west-1"
SETUP_CALLS = 4
"""Calls that `S3Server` sends itself; the server accepts these without a key and verifies the others."""
POLICY = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"*"}]}'


class S3Server(ProcessGroup):
    """A server on a loopback port, with one bucket and one user."""

    def __init__(self, folder: Path, bucket: str) -> None:
        super().__init__(folder)
        self.url = f"http://127.0.0.1:{free_port()}"
        self.bucket = bucket

    def __enter__(self) -> Self:
        port = self.url.rpartition(":")[2]
        variables = {"INITIAL_NO_AUTH_ACTION_COUNT": str(SETUP_CALLS)}
        self.process: subprocess.Popen[bytes] = self.start(
            "s3", [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port], variables
        )
        self.wait_until(self._is_ready, "the S3 server did not start")
        iam = self._client("iam", "setup", "setup")
        iam.create_user(UserName="user")
        key = iam.create_access_key(UserName="user")["AccessKey"]
        iam.put_user_policy(UserName="user", PolicyName="s3", PolicyDocument=POLICY)
        location: Any = {"LocationConstraint": REGION}
        self._client("s3", "setup", "setup").create_bucket(Bucket=self.bucket, CreateBucketConfiguration=location)
        self._key = key["AccessKeyId"], key["SecretAccessKey"]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def variables(self) -> dict[str, str]:
        """Return the AWS environment of a process that uses the server."""
        key, secret = self._key
        return {"AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}

    def objects(self) -> dict[str, bytes]:
        """Return all objects of the bucket by their keys."""
        client = self._client("s3", *self._key)
        keys = [one["Key"] for one in client.list_objects_v2(Bucket=self.bucket).get("Contents", ())]
        return {key: client.get_object(Bucket=self.bucket, Key=key)["Body"].read() for key in keys}

    def _client(self, service: str, key: str, secret: str) -> Any:
        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            config=Config(retries={"max_attempts": 1}),
        )

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/moto-api/").status_code == 200
        except httpx.TransportError:
            return False
