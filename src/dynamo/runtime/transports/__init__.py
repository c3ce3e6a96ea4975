"""Connections to servers that planes may use; one package per server.

This package connects, reconnects and authenticates. It does not depend on requests, events or instances.
"""
