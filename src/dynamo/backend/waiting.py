"""Unsupported flags: flags of upstream's workers that are accepted by name only. Pure."""

from dynamo.core.waiting import Waiting

WAITING = (
    Waiting("--kv-state-endpoint", "DYN_KV_STATE_ENDPOINT", ""),
    Waiting("--fpm-trace", "DYN_FPM_TRACE", False),
    Waiting("--connector", "DYN_CONNECTOR", ""),
    Waiting("--multimodal-embedding-cache-capacity-gb", "DYN_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB", "0"),
    Waiting("--multimodal-embedding-cache-publisher", "DYN_MULTIMODAL_EMBEDDING_CACHE_PUBLISHER", False),
    Waiting("--output-modalities", "DYN_OUTPUT_MODALITIES", "text"),
    Waiting("--media-output-fs-url", "DYN_MEDIA_OUTPUT_FS_URL", "file:///tmp/dynamo_media"),
    Waiting("--media-output-http-url", "DYN_MEDIA_OUTPUT_HTTP_URL", ""),
    Waiting("--health-check-payload", None, "", hint="set DYN_HEALTH_CHECK_PAYLOAD instead"),
    Waiting("--migration-limit", None, "0", hint="set --migration-limit of the frontend instead"),
)
