"""Common parts of both TCP framings."""

import socket

from dynamo.runtime.request_plane.tcp.common import TcpLimits, tune


def test_tcp_response_limit_equals_request_limit_with_envelope() -> None:
    limits = TcpLimits(message_bytes_max=100)
    assert limits.answer_bytes_max > 100
    assert limits.write_buffer_bytes_max >= 2 * 100


class PairTransport:
    def __init__(self, sock: socket.socket | None) -> None:
        self.sock = sock
        self.high = 0

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self.sock


def test_tcp_connection_disables_delay_and_bounds_unsent_data() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        transport = PairTransport(sock)
        tune(transport, 7)  # type: ignore[arg-type]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert transport.high == 7
    tune(PairTransport(None), 7)  # type: ignore[arg-type]
