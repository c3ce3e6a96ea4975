"""Transport that records the output of upstream's framing."""

from dynamo.runtime.request_plane import frame


class UpstreamTransport:
    """Both ends of upstream's framing write to it; `take` decodes it."""

    def __init__(self) -> None:
        self.data = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_extra_info(self, name: str) -> None:
        return None

    def take(self) -> list[tuple[bytes, bytes]]:
        data, self.data = self.data, b""
        return frame.TwoPartDecoder(1 << 20).feed(data)
