"""Options of media decoding and fetching."""

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.llm import MediaDecoder, MediaFetcher


def test_decoder_accepts_limits_only() -> None:
    decoder = MediaDecoder()
    decoder.enable_image({"limits": {"max_image_width": 100}})
    assert decoder.image == {"limits": {"max_image_width": 100}}
    with pytest.raises(InvalidArgument, match="unknown field 'width'"):
        decoder.enable_image({"width": 1})


def test_media_fetcher_stores_its_options() -> None:
    fetcher = MediaFetcher()
    fetcher.user_agent("a")
    fetcher.allow_direct_ip(allow=True)
    fetcher.allow_direct_port(allow=False)
    fetcher.allow_private_ips(allow=False)
    fetcher.allowed_media_domains(["b", "a", "b"])
    fetcher.timeout_ms(500)
    assert fetcher.options["allowed_media_domains"] == ["a", "b"]
    assert fetcher.options["timeout_ms"] == 500
    with pytest.raises(InvalidArgument, match="timeout_ms"):
        fetcher.timeout_ms(-1)
