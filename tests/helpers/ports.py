"""A port for a server of a test."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One that nothing listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
