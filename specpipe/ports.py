"""Ports that somebody wants to listen on, and how an address is written.

Owns: whether a port can be had, in words for people; what an address looks like. Must not know: gRPC, HTTP.
"""

from __future__ import annotations

import errno
import re
import socket
from typing import Final

from specpipe.errors import ConfigError

LOOPBACK: Final = "127.0.0.1"
EVERY_INTERFACE: Final = ("0.0.0.0", "[::]")  # as hosts in addresses

_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")


def check_port(host: str, port: int) -> None:
    """Raise ConfigError, in a clear sentence, if nobody could listen there: gRPC says only that it failed."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is already in use") from None
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {error.strerror or error}") from None


def is_address(text: str) -> bool:
    """Whether it is HOST:PORT, as something that can be dialled: an IPv6 host has brackets, port 0 is none."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match["port"]) < 2**16


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
