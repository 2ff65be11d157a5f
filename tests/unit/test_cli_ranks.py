"""`specpipe target-worker --rank`: what cannot be together is refused in one sentence, before anything is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from specpipe.cli.app import run
from specpipe.cli.services import TargetFlags, rendezvous_config
from specpipe.config import RANK_TOKEN_VARIABLE, RendezvousConfig

TOKEN = "a secret of this group"
TWO = ("--tensor-parallel-size", "2")
AT = ("--rendezvous", "host-a:6003")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((*TWO, *AT), "--rendezvous and --rank are given together"),
        ((*TWO, "--rank", "1"), "--rendezvous and --rank are given together"),
        ((*AT, "--rank", "0"), "needs --tensor-parallel-size 2 or more, got 1"),
        ((*TWO, *AT, "--rank", "2"), "--rank must be from 0 to 1 with --tensor-parallel-size 2, got 2"),
        ((*TWO, *AT, "--rank", "-1"), "--rank must be from 0 to 1"),
        ((*TWO, *AT, "--rank", "one"), "--rank must be an integer, got 'one'"),
        ((*TWO, "--rendezvous", "host-a", "--rank", "1"), "--rendezvous needs HOST:PORT, got 'host-a'"),
        ((*TWO, "--rendezvous", "0.0.0.0:6003", "--rank", "1"), "rank 1 dials rank 0, so name its host"),
        ((*TWO, *AT, "--rank", "0", "--rank-core", "0"), "--rank-core is for ranks of one host"),
    ],
)
def test_what_cannot_be_together_is_refused_in_one_sentence(
    arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RANK_TOKEN_VARIABLE, TOKEN)
    assert run(["target-worker", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert reason in said


@pytest.mark.parametrize("token", [None, "", "too short"])
def test_ranks_of_several_hosts_need_a_secret(
    token: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RANK_TOKEN_VARIABLE, raising=False)
    if token is not None:
        monkeypatch.setenv(RANK_TOKEN_VARIABLE, token)
    assert run(["target-worker", *TWO, *AT, "--rank", "1"]) == 2
    said = capsys.readouterr().err
    assert f"{RANK_TOKEN_VARIABLE} must hold a secret of 16 characters" in said
    assert not token or token not in said


def test_the_secret_is_in_no_text_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANK_TOKEN_VARIABLE, TOKEN)
    config = rendezvous_config(TargetFlags(tensor_parallel_size=2, rendezvous="host-a:6003", rank=1))
    assert config == RendezvousConfig(rank=1, address="host-a:6003", token=TOKEN)
    assert TOKEN not in repr(config)


def test_a_wrong_rank_is_refused_without_torch() -> None:
    code = (
        "import sys\nfrom specpipe.cli.app import run\n"
        "code = run(['target-worker', '--tensor-parallel-size', '2', '--rank', '1'])\n"
        "print(code, 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert said.stdout.strip() == "2 False"
