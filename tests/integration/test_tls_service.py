"""A service whose processes speak mutual TLS, as its users start it and ask it; workers are found by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Authority, flags_of
from running import run_command, running_part
from tiny_models import TinyPair


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority.create(tmp_path_factory.mktemp("certificates") / "ours")
    authority.issue("coordinator", "127.0.0.1", "coordinator")
    authority.issue("target-worker", "target-worker")  # as in a cluster: for its role, not for its address
    authority.issue("client", "client")
    return authority


@pytest.fixture(scope="module")
def address(authority: Authority, tiny_pair: TinyPair, log_folder: Path) -> Iterator[str]:
    """Of a coordinator with one target worker."""
    model = ("--model", str(tiny_pair.target), "--dtype", "float32")
    own = flags_of(authority.config("target-worker"))
    with running_part(log_folder / "tls_target.log", "target-worker", *model, *own) as worker:
        flags = ("--target", f"dns:{worker}", "--tokenizer", str(tiny_pair.target))
        own = flags_of(authority.config("coordinator"))
        with running_part(log_folder / "tls_coordinator.log", "coordinator", *flags, *own) as coordinator:
            yield coordinator


ASKED = ("generate", "Once", "--max-tokens", "4", "--connect")


def test_a_client_with_a_certificate_gets_its_answer(address: str, authority: Authority) -> None:
    done = run_command(*ASKED, address, *flags_of(authority.config("client")))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "it closed the connection at once: it may want TLS, or a certificate from who calls it"),
        (
            ("--tls-ca", "{ours}"),
            "it closed the connection at once: it may want TLS, or a certificate from who calls it",
        ),
        (("--tls-ca", "{theirs}"), "its certificate is not signed by the CA that was named with --tls-ca"),
    ],
)
def test_everybody_else_is_refused_in_one_sentence(
    address: str, authority: Authority, tmp_path: Path, flags: tuple[str, ...], sentence: str
) -> None:
    theirs = Authority.create(tmp_path / "theirs")
    named = [flag.format(ours=authority.ca, theirs=theirs.ca) for flag in flags]
    done = run_command(*ASKED, address, *named)
    assert done.returncode == 1
    assert done.stderr == f"error: {address}: {sentence}\n"
