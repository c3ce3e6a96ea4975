"""Request plane over TCP: batched frames between processes of this implementation, Dynamo framing with released peers.

Each framing has two modules, one per role; `plane` listens, connects and selects the framing.
"""

from dynamo.runtime.request_plane.tcp.common import TcpLimits, local_address
from dynamo.runtime.request_plane.tcp.plane import TcpOptions, TcpPlane
from dynamo.runtime.request_plane.tcp.tls import TcpTls, TcpTlsFiles

__all__ = ["TcpLimits", "TcpOptions", "TcpPlane", "TcpTls", "TcpTlsFiles", "local_address"]
