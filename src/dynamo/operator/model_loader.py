"""Loading of adapters into workers, over the system servers of their pods."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from dynamo.core.codec import json_encode
from dynamo.core.errors import DynamoException
from dynamo.core.http_client import Deadlines, HttpClient
from dynamo.operator.reconcile.models import ServingPod
from dynamo.protocols.kubernetes.models import DynamoModel

logger = logging.getLogger(__name__)

DEADLINES = Deadlines(connect_s=5.0, first_s=60.0, between_s=60.0, whole_s=90.0)
"""A worker downloads the adapter before it responds."""
PARALLEL = 10
BODY_BYTES = 1 << 16
ERROR_CHARS = 200


class AdapterLoader:
    """Loads and unloads adapters, several pods at a time."""

    async def load(self, model: DynamoModel, pods: Sequence[ServingPod]) -> dict[str, str | None]:
        """Load a model's adapter into each pod; return the errors by uid, None for success. Repeating it is harmless."""
        assert model.spec.source is not None
        body = json_encode({"lora_name": model.spec.model_name, "source": {"uri": model.spec.source.uri}})
        return await self._each(pods, "POST", "/v1/loras", body)

    async def unload(self, model: DynamoModel, pods: Sequence[ServingPod]) -> dict[str, str | None]:
        """Remove a model's adapter from each pod; return the errors by uid."""
        return await self._each(pods, "DELETE", f"/v1/loras/{quote(model.spec.model_name, safe='')}", b"")

    async def _each(self, pods: Iterable[ServingPod], method: str, path: str, body: bytes) -> dict[str, str | None]:
        slots = asyncio.Semaphore(PARALLEL)
        found: dict[str, str | None] = {}

        async def one(pod: ServingPod) -> None:
            async with slots:
                found[pod.uid] = await self._call(pod, method, path, body)

        async with asyncio.TaskGroup() as group:
            for pod in pods:
                group.create_task(one(pod))
        return found

    async def _call(self, pod: ServingPod, method: str, path: str, body: bytes) -> str | None:
        client = HttpClient(pod.address, DEADLINES, setting="address of a pod")
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            async with client.request(method, path, body, headers) as response:
                text = (await response.read(BODY_BYTES)).decode(errors="replace")
                if 200 <= response.status < 300:
                    return None
                return f"{response.status}: {text[:ERROR_CHARS]}"
        except DynamoException as error:
            return str(error)[:ERROR_CHARS]
        finally:
            client.close()
