"""Where the server is reached, and by whom."""

from __future__ import annotations

import ipaddress
import socket

from overspill.errors import ConfigError


def bound(host: str, port: int, *, anyone: bool) -> socket.socket:
    """A socket at `host` and `port` (0 takes a free one) that does not listen yet.

    ConfigError where it cannot be had, and where others than this machine could reach it and not `anyone` may.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host is {host!r}, which has no address: {error}", hint="an address of this machine"
        ) from error
    if not (is_loopback(str(address[0])) or anyone):
        raise ConfigError(
            f"host is {host!r}, which others than this machine can reach, and there is no API key",
            hint="--api-key KEY, or OVERSPILL_API_KEY in the environment; --allow-unauthenticated serves anyone",
        )
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port {port} of {host} cannot be had: {error.strerror}", hint="another --port; 0 takes a free one"
        ) from error
    return listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine itself."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
