import pytest

from dynamo.core.errors import ConfigError
from dynamo.kvbm.config import KvbmConfig
from dynamo.kvbm.logical.policies import Rule


def test_kvbm_config_without_variables_has_no_tiers() -> None:
    config = KvbmConfig.read({})
    assert config == KvbmConfig()
    assert not config.is_enabled


def test_kvbm_sizes_are_gigabytes_or_blocks() -> None:
    config = KvbmConfig.read({"DYN_KVBM_CPU_CACHE_GB": "0.5", "DYN_KVBM_DISK_CACHE_GB": "2"})
    assert config.is_enabled
    assert config.host_blocks(1 << 20) == 512
    assert config.disk_blocks_of(1 << 20) == 2048
    config = KvbmConfig.read({"DYN_KVBM_CPU_CACHE_GB": "1", "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "7"})
    assert config.host_blocks(1 << 20) == 7


def test_kvbm_config_reads_upstream_variables() -> None:
    config = KvbmConfig.read(
        {
            "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "true",
            "DYN_KVBM_DISK_DISABLE_O_DIRECT": "1",
            "DYN_KVBM_DISK_ZEROFILL_FALLBACK": "yes",
            "DYN_KVBM_OBJECT_ENABLED": "1",
            "DYN_KVBM_OBJECT_BUCKET": "cache-{worker_id}",
            "DYN_KVBM_OBJECT_ENDPOINT": "http://minio:9000",
            "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR": "false",
            "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY": "20",
            "KVBM_OFFLOAD_G2_TO_G3_POLICIES": '["presence_lfu"]',
            "KVBM_OFFLOAD_G2_TO_G3_PRESENCE_LFU_MIN_LFU_COUNT": "3",
            "KVBM_OFFLOAD_G1_TO_G2_POLICIES": "pass_all",
        }
    )
    assert (config.disk_filter, config.disk_direct, config.disk_zerofill) == (False, False, True)
    assert (config.object_enabled, config.object_endpoint) == (True, "http://minio:9000")
    assert (config.has_events, config.host_priority_min) == (False, 20)
    assert (config.to_host, config.to_disk, config.to_disk_lfu_min) == ((Rule.PASS_ALL,), (Rule.PRESENCE_LFU,), 3)


def test_remote_disk_storage_is_an_object_store_directory() -> None:
    config = KvbmConfig.read({"DYN_KVBM_REMOTE_STORAGE_TYPE": "disk", "DYN_KVBM_REMOTE_DISK_PATH": "/nfs/kv"})
    assert (config.object_enabled, config.object_endpoint) == (True, "file:///nfs/kv")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DYN_KVBM_CPU_CACHE_GB", "-1"),
        ("DYN_KVBM_CPU_CACHE_GB", "much"),
        ("DYN_KVBM_DISK_CACHE_GB", "nan"),
        ("DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY", "101"),
        ("DYN_KVBM_TRANSFER_BATCH_SIZE", "0"),
        ("DYN_KVBM_OBJECT_TIMEOUT_SECS", "0"),
        ("DYN_KVBM_EVICTION_POLICY", "random"),
        ("DYN_KVBM_REMOTE_STORAGE_TYPE", "disk"),
        ("DYN_KVBM_PEERS", "true"),
        ("KVBM_ONBOARD_MODE", "intra"),
        ("KVBM_OFFLOAD_G1_TO_G2_POLICIES", '["sometimes"]'),
        ("KVBM_OFFLOAD_G1_TO_G2_POLICIES", "[1"),
    ],
)
def test_kvbm_config_error_names_an_invalid_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        KvbmConfig.read({name: value})
