"""Who may ask, and what every answer's headers say.

Owns: the checks of Host and Origin, the security headers. Must not know: routes.

There is no login. A page of another site must not reach the service through its visitor's browser, so what such a
browser says about the asking page is checked: Origin and Sec-Fetch-Site, and, where only this machine can connect, that
the Host is a name of this machine (a foreign name that resolves to it is how sites get around the first two).
"""

from __future__ import annotations

import ipaddress
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.web.answers import refusal

API_PREFIX: Final = "/ui/api/"
LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """ASGI middleware. `policy` is the Content-Security-Policy, `interface` where the server listens."""

    def __init__(self, app: ASGIApp, *, policy: str, interface: str) -> None:
        self._app = app
        self._headers = {**HEADERS, "content-security-policy": policy}
        self._names = LOCAL_NAMES | {interface} if is_loopback(interface) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
            await send(message)

        reason = self._reason_against(Headers(scope=scope), scope["path"])
        answer = refusal(403, "PERMISSION_DENIED", reason) if reason else self._app
        await answer(scope, receive, send_guarded)

    def _reason_against(self, headers: Headers, path: str) -> str:
        """Empty: welcome."""
        host = headers.get("host", "")
        if self._names is not None and _name_of(host) not in self._names:
            return f"host: {host!r} is no name of this machine, and only this machine is served"
        if not path.startswith(API_PREFIX):
            return ""
        origin = headers.get("origin")
        if origin is not None and _site_of(origin) != host.lower():
            return f"origin: pages of {origin!r} may not ask; only the page served here may"
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return "origin: pages of other sites may not ask; only the page served here may"
        return ""


def is_loopback(interface: str) -> bool:
    try:
        return ipaddress.ip_address(interface).is_loopback
    except ValueError:
        return interface == "localhost"


def _name_of(host: str) -> str:
    """Of "name:port" or "[address]:port"; empty for what is neither."""
    try:
        return "" if set(host) & set("/?#@\\") else (urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return ""


def _site_of(origin: str) -> str | None:
    """Of "scheme://name:port"; None for what is no origin."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None
