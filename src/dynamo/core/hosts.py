"""Hosts that servers listen on: which of them are reachable from this machine alone."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether a server that listens on `host` can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # A name of a network interface; or the empty host, which is every interface.
        return False
