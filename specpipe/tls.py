"""Certificates: how a server shows and a client checks who it is.

Owns: reading the files of a TlsConfig, gRPC's credentials made of them, the name that a peer's certificate must have.
Must not know: services, flags.

Files are read again where certificates are renewed in place: a server reads them at each handshake, a client for each
new channel. Connections that exist go on with what they began with.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from specpipe.config import TlsConfig
from specpipe.errors import ConfigError

logger = logging.getLogger(__name__)

NO_TLS: Final = TlsConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """What lies in the files of a TlsConfig now; None for those that are not named."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


class _ServerFiles:
    """The newest files that fit together. Called by gRPC at each handshake, on threads of its own."""

    def __init__(self, tls: TlsConfig) -> None:
        """Raises ConfigError."""
        self._tls = tls
        self._files = _read(tls)
        self._problem = ""
        self.first = _configuration(self._files)

    def __call__(self) -> Any:
        """None: what was there before still holds."""
        try:
            files = _read(self._tls, known=self._files)
        except ConfigError as error:
            if str(error) != self._problem:
                logger.warning("certificates are not renewed: %s", error)
            self._problem = str(error)
            return None
        self._problem = ""
        if files == self._files:
            return None
        self._files = files
        logger.info("%s is renewed", self._tls.cert)
        return _configuration(files)


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """With a CA, clients must show a certificate of its. Raises ConfigError."""
    if not tls.cert:
        raise ConfigError("a service needs a certificate of its own for TLS: --tls-cert and --tls-key")
    files = _ServerFiles(tls)
    credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(files.first, files, bool(tls.ca))
    return credentials


def channel_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    """Checks the server by the CA; shows a certificate if there is one. Raises ConfigError."""
    if not tls.ca:
        raise ConfigError("TLS needs --tls-ca: who is called is checked by it")
    files = _read(tls)
    return grpc.ssl_channel_credentials(files.ca, files.key, files.cert)


def name_of_worker(address: str, kind: str) -> str:
    """The name that the certificate of a worker at `address` must have; empty: the host's.

    A worker found by DNS has the address of a pod, which no certificate is made out to. Then it is that of its role:
    target-worker or draft-worker.
    """
    try:
        ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return ""
    return f"{kind}-worker"


def _configuration(files: _Files) -> Any:
    assert files.key is not None
    assert files.cert is not None
    return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], files.ca)


def _read(tls: TlsConfig, *, known: _Files | None = None) -> _Files:
    """Checked unless they are those that are known. Raises ConfigError for what is missing or does not fit together."""
    files = _Files(
        cert=_bytes_of("--tls-cert", tls.cert), key=_bytes_of("--tls-key", tls.key), ca=_bytes_of("--tls-ca", tls.ca)
    )
    if files != known:
        _check(tls)
    return files


def _bytes_of(flag: str, path: str) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from None


def _check(tls: TlsConfig) -> None:
    """By Python's ssl, which says at once what gRPC would find out, and hide, at each handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if tls.cert:
        load = functools.partial(context.load_cert_chain, tls.cert, tls.key, password=_no_password)
        _checked(f"--tls-cert {tls.cert} and --tls-key {tls.key}: no certificate and its private key, in PEM", load)
    if tls.ca:
        load = functools.partial(context.load_verify_locations, cafile=tls.ca)
        _checked(f"--tls-ca {tls.ca}: no certificate of a CA in it, in PEM", load)


def _checked(problem: str, load: Any) -> None:
    try:
        load()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        logger.debug("%s: %s", problem, error)
        raise ConfigError(problem) from None


def _no_password() -> str:
    """Without it the library would ask on the terminal."""
    raise ValueError("the key is encrypted")
