"""MediaDecoder and MediaFetcher: upstream's options for frontends that fetch and decode the media of requests.

Frontends of this package pass media to the workers as URLs, so that `register_model` refuses both; the classes check
and keep their options for programs that build them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.core.errors import InvalidArgument


class MediaDecoder:
    """Decoders of a model's media; none is enabled at first."""

    def __init__(self) -> None:
        self.image: dict[str, Any] | None = None

    def enable_image(self, decoder_options: Mapping[str, Any]) -> None:
        """Enable images, with `limits` or the defaults. Raise `InvalidArgument` for another option."""
        for name in decoder_options:
            if name != "limits":
                raise InvalidArgument(f"image decoder: unknown field {name!r}, expected limits", param=name)
        self.image = dict(decoder_options)


class MediaFetcher:
    """Rules for the media URLs that are fetched."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def user_agent(self, user_agent: str) -> None:
        """Set the User-Agent header."""
        self.options["user_agent"] = user_agent

    def allow_direct_ip(self, allow: bool) -> None:
        """Set whether the host of a URL may be an IP address."""
        self.options["allow_direct_ip"] = allow

    def allow_direct_port(self, allow: bool) -> None:
        """Set whether a URL may name a port."""
        self.options["allow_direct_port"] = allow

    def allow_private_ips(self, allow: bool) -> None:
        """Set whether a host may resolve to a private address."""
        self.options["allow_private_ips"] = allow

    def allowed_media_domains(self, domains: Sequence[str]) -> None:
        """Set the only domains from which media are fetched."""
        self.options["allowed_media_domains"] = sorted(set(domains))

    def timeout_ms(self, timeout_ms: int) -> None:
        """Set the time limit of a download in milliseconds. Raise `InvalidArgument` if it is negative."""
        if timeout_ms < 0:
            raise InvalidArgument(f"timeout_ms {timeout_ms}: must be 0 or more", param="timeout_ms")
        self.options["timeout_ms"] = timeout_ms
