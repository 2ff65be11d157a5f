"""Certificates for tests, made by the openssl command: a CA signs what it is asked to."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from specpipe.config import TlsConfig

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """A CA in a folder of its own."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Authority:
        """Skips the test where there is no openssl."""
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed (Debian: apt-get install openssl)")
        folder.mkdir()
        subject = ("-subj", f"/CN={folder.name}")
        _openssl(folder, "req", "-x509", *_KEY, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", *subject)
        return cls(folder=folder)

    @property
    def ca(self) -> str:
        return str(self.folder / "ca.crt")

    def issue(self, file_name: str, *names: str, num_days: int = 2) -> TlsConfig:
        """A certificate for these names, and the CA to check others by. With a negative `num_days` it has expired."""
        entries = ("IP:" + name if name[0].isdigit() else "DNS:" + name for name in names)
        (self.folder / f"{file_name}.ext").write_text("subjectAltName=" + ",".join(entries))
        request = ("-keyout", f"{file_name}.key", "-out", f"{file_name}.csr", "-subj", f"/CN={file_name}")
        _openssl(self.folder, "req", *_KEY, *request)
        signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", f"{file_name}.ext")
        made = ("-in", f"{file_name}.csr", "-out", f"{file_name}.crt", "-days", str(num_days))
        _openssl(self.folder, "x509", "-req", *signing, *made)
        return self.config(file_name)

    def config(self, file_name: str) -> TlsConfig:
        return TlsConfig(
            cert=str(self.folder / f"{file_name}.crt"), key=str(self.folder / f"{file_name}.key"), ca=self.ca
        )


def flags_of(tls: TlsConfig) -> list[str]:
    return [f"--tls-cert={tls.cert}", f"--tls-key={tls.key}", f"--tls-ca={tls.ca}"]


def _openssl(folder: Path, *arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
