"""What gRPC itself says of a call, in words for people: nobody there, no answer yet, another kind of server.

Owns: those sentences. Must not know: gRPC's classes, what a service says (its own words travel as they are).
Each sentence speaks of the peer, so that it reads well behind "127.0.0.1:50051: ".
"""

from __future__ import annotations

from typing import Final

_SHUT_OUT: Final = "it closed the connection at once: it may want TLS, or a certificate from who calls it"
"""A TLS server's refusal of a plain caller, and of one without the right certificate: the same to gRPC."""

# The first part that gRPC's text (1.81 to 1.85) contains decides.
_UNAVAILABLE: Final = (
    (
        "hostname verification",
        "its certificate is for another name than the one it was called by (of a worker called by IP address or found "
        "by dns: it must be for target-worker or draft-worker)",
    ),
    ("wrong_version_number", "it does not speak TLS: check the address, or leave the TLS flags out"),
    ("certificate has expired", "its certificate has expired"),
    ("certificate is not yet valid", "its certificate is not valid yet: check the clocks"),
    ("certificate_verify_failed", "its certificate is not signed by the CA that was named with --tls-ca"),
    ("handshake failed", "no TLS connection to it can be made: check the certificates"),
    ("connection refused", "nothing listens there: it is not started, or the address is wrong"),
    ("http1.x server", "a web server is there and no specpipe service: check the address"),
    ("http/2", "no gRPC server is there: check the address"),
    ("timed out", "it does not answer: it may still be starting, or the address is wrong"),
    ("timeout", "it does not answer: it may still be starting, or the address is wrong"),
    ("resolving", "its host name is not known: check the address"),
    ("dns", "its host name is not known: check the address"),
    ("no route", "no network leads there: check the address"),
    ("unreachable", "no network leads there: check the address"),
    ("keepalive", "it has stopped answering"),
    ("ping", "it has stopped answering"),
    ("cancelling all calls", "it is stopping"),
    ("goaway", "it is stopping"),
    ("reset by peer", "it closed the connection"),
    ("closed", "it closed the connection"),
    ("broken pipe", "it closed the connection"),
)

_BY_CODE: Final = {
    "UNIMPLEMENTED": "it is no specpipe service of the kind that was asked: check the address",
    "DEADLINE_EXCEEDED": "no answer came within the time allowed",
    "CANCELLED": "it ended the call: it is stopping",  # who cancels a call of its own hears of no status
    "INTERNAL": "the connection broke",
    "UNKNOWN": "the call failed without a reason",
    "RESOURCE_EXHAUSTED": "it has no room for this call now",
}

CODES: Final = frozenset({"UNAVAILABLE", *_BY_CODE})
"""Statuses that gRPC makes by itself."""


def sentence_of(code: str, details: str) -> str:
    """`code` is the name of one of CODES, `details` is gRPC's text for it."""
    if code != "UNAVAILABLE":
        return _BY_CODE[code]
    text = details.lower()
    if "failed to connect" in text and "socket closed" in text:
        return _SHUT_OUT
    return next((sentence for part, sentence in _UNAVAILABLE if part in text), "it cannot be reached")
