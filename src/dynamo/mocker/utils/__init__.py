"""Helpers of the mocker that programs import: `kv_cache` reads the size of a token's keys and values from a model."""
