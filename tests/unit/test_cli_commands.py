"""What a command line is refused for, in one sentence and at once."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

from specpipe.cli.app import app, main, run
from specpipe.cli.flags import ServerFlags, TlsFlags
from specpipe.cli.services import server_config

NOBODY = "127.0.0.1:9"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["generate"], "give a prompt"),
        (["generate", "x", "--prompts", "f"], "not both"),
        (["generate", ""], "prompt must be at least one character"),
        (["generate", "x", "--frobnicate"], "No such option"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["generate", "x", "--temperature", "nan"], "temperature must be a finite number"),
        (["generate", "x", "--mode", "warp"], "error: --mode must be off, sync or pipelined, got 'warp'"),
        (["generate", "x", "--rule", "warp"], "error: --rule must be coupled or rejection, got 'warp'"),
        (["generate", "x", "--dtype", "int3"], "error: --dtype must be auto, float32 or bfloat16, got 'int3'"),
        (["generate", "x", "--device", "tpu"], "error: --device must be cpu or cuda, got 'tpu'"),
        (["generate", "x", "--device", "cudafoo"], "error: --device must be cpu or cuda, got 'cudafoo'"),
        (
            ["generate", "x", "--log-level", "loud"],
            "error: --log-level must be debug, info, warning or error, got 'loud'",
        ),
        (
            ["coordinator", "--target", "a:1", "--drafter", "x"],
            "error: --drafter must be model, ngram or none, got 'x'",
        ),
        (["generate", "x", "--seed", "1.5"], "error: --seed must be an integer, got '1.5'"),
        (
            ["generate", "x", "--stop-token-id", "1", "--stop-token-id", "a"],
            "--stop-token-id must be an integer, got 'a'",
        ),
        (["generate", "x", "--top-p", "half"], "error: --top-p must be a number, got 'half'"),
        (["generate", "x", "--max-tokens", "9" * 5000], f"error: --max-tokens must be an integer, got '{'9' * 40}...'"),
        (["generate", "x", "--mode"], "requires an argument"),
        (["generate", "x", "--target", ""], "--target must name"),
        (["generate", "x", "--connect", "nowhere"], "--connect needs HOST:PORT"),
        (["generate", "x", "--connect", "http://localhost:1"], "--connect needs HOST:PORT, got 'http://localhost:1'"),
        (["generate", "x", "--connect", NOBODY, "--draft", "none"], "--draft cannot be used with --connect"),
        (["generate", "x", "--connect", NOBODY, "--no-pin"], "--no-pin cannot be used with --connect"),
        (["generate", "x", "--target", "/no/such/folder"], "no such model folder"),
        (["serve", "--target", "/no/such/folder"], "no such model folder"),
        (["coordinator"], "--target HOST:PORT"),
        (["coordinator", "--target", "host"], "--target needs [dns:]HOST:PORT"),
        (["target-worker", "--model", "/no/such/folder"], "no such model folder"),
        (["target-worker", "--core", "9999"], "error: --core 9999 is not one of this process's cores"),
        (["target-worker", "--rank-core", "9999", "--tensor-parallel-size", "2"], "error: --rank-core 9999 is not one"),
        (["target-worker", "--max-nodes", "0"], "error: --max-nodes must be at least 1"),
        (["target-worker", "--max-batch-tokens", "0"], "error: --max-batch-tokens must be at least 1, got 0"),
        (["target-worker", "--dtype", "int8"], "error: --dtype int8 is for draft workers"),
        (["draft-worker", "--grace", "-1"], "error: --grace must be at least 0, got -1"),
        (["draft-worker", "--trace-level", "debug"], "No such option: --trace-level"),
        (["target-worker", "--trace-content"], "No such option: --trace-content"),
        (
            ["target-worker", "--max-shared-slowdown", "nan"],
            "error: --max-shared-slowdown must be a number of at",
        ),
        (["draft-worker", "--max-depth", "0"], "error: --max-depth must be at least 1"),
        (["coordinator", "--target", "a:1", "--max-queue", "-1"], "error: --max-queue must be at least 0"),
        (["coordinator", "--target", "a:1", "--tokenizer", "/no/such"], "--tokenizer /no/such: no such folder"),
        (["coordinator", "--target", "a:1", "--tokenizer", "/"], "--tokenizer /: it has no tokenizer.json"),
        (["frobnicate"], "No such command"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_sentence(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert reason in err


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--num-speculative-tokens", "0", "must be from 1 to 256, got 0"),
        ("--num-speculative-tokens", "257", "must be from 1 to 256, got 257"),
        ("--max-context", "0", "must be at least 1, got 0"),
        ("--max-batch-tokens", "0", "must be at least 1, got 0"),
        ("--draft-workers", "0", "must be at least 1, got 0"),
        ("--target-workers", "-1", "must be at least 1, got -1"),
        ("--tensor-parallel-size", "0", "must be at least 1, got 0"),
        ("--port", "70000", "must be in 0..65535, got 70000"),
        ("--grace", "nan", "must be at least 0, got nan"),
        ("--num-slots", "0", "must be at least 1, got 0"),
        ("--num-slots", "1", "must be at least 2, got 1"),
        ("--trace-sample", "2", "must be from 0 to 1, got 2.0"),
        ("--metrics-port", "70000", "must be in 0..65535, got 70000"),
        ("--http-port", "70000", "must be in 0..65535, got 70000"),
    ],
)
def test_a_wrong_service_flag_is_refused_before_anything_starts(
    tiny_folders: tuple[Path, Path], flag: str, value: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = tiny_folders
    assert run(["serve", "--target", str(target), "--draft", str(draft), flag, value]) == 2
    assert f"error: {flag} {reason}" in capsys.readouterr().err


def test_models_that_do_not_fit_together_are_refused_naming_the_first_id(
    tiny_folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = tiny_folders
    other = tmp_path / "other"
    other.mkdir()
    for file in draft.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    content = json.loads((other / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    first, second = (next(token for token, i in vocab.items() if i == wanted) for wanted in (70, 71))
    vocab[first], vocab[second] = 71, 70
    (other / "tokenizer.json").write_text(json.dumps(content))
    assert run(["generate", "x", "--target", str(target), "--draft", str(other)]) == 2
    assert "id 70" in capsys.readouterr().err


def test_cut_weights_are_refused_naming_the_file(
    tiny_folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    for file in tiny_folders[0].iterdir():
        (cut / file.name).write_bytes(file.read_bytes())
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert run(["generate", "x", "--target", str(cut), "--draft", "none"]) == 2
    assert "model.safetensors" in capsys.readouterr().err


def test_the_command_line_loads_neither_torch_nor_transformers_and_answers_soon(tmp_path: Path) -> None:
    script = (
        "import sys; from specpipe.cli.app import run; code = run(sys.argv[1:]);"
        "loaded = {'torch', 'transformers'} & set(sys.modules); sys.exit(f'loaded {loaded}' if loaded else code)"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script, "generate", "x", "--target", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "is not a model folder" in done.stderr
    assert time.monotonic() - started < 8  # 2 s on a quiet machine


def test_nobody_at_the_address_fails_each_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "a", "b", "--connect", NOBODY, "--json"]) == 1
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (first["prompt"], second["prompt"]) == ("a", "b")
    assert first["error"]["code"] == "UNAVAILABLE"
    assert first["error"]["message"] == f"{NOBODY}: nothing listens there: it is not started, or the address is wrong"


@pytest.mark.parametrize("command", [["generate", "x"], ["serve"], ["target-worker"], ["draft-worker"]])
def test_a_gpu_that_is_not_there_is_told_without_loading_torch(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specpipe.cli.models.GPU_FILES", ("/no/such/device",))
    assert run([*command, "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "error: --device cuda: this machine has no GPU driver; use --device cpu\n"


@pytest.mark.parametrize(
    ("is_terminal", "text"),
    [(True, "ready at {address}: give it to --target"), (False, "{address}")],
)
def test_a_script_gets_the_bare_address_of_a_service_and_a_person_a_sentence(is_terminal: bool, text: str) -> None:
    terminal, pipe, kept = os.openpty(), os.pipe(), os.dup(1)
    os.dup2((terminal if is_terminal else pipe)[1], 1)
    try:
        config = server_config(ServerFlags(), TlsFlags(), "ready at {address}: give it to --target")
    finally:
        os.dup2(kept, 1)
    assert config.ready_text == text
    assert config.ready_fd is not None
    for descriptor in (*terminal, *pipe, kept, config.ready_fd):
        os.close(descriptor)


@pytest.mark.parametrize(
    ("command", "is_warned"),
    [
        (["serve", "--mode", "sync", "--draft", "none"], True),
        (["serve", "--draft", "none"], False),
        (["serve", "--mode", "sync"], False),
    ],
)
def test_a_service_that_cannot_draft_in_the_mode_asked_for_says_so(
    command: list[str], is_warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # so that it ends there
        taken.bind(("127.0.0.1", 0))
        assert run([*command, "--port", str(taken.getsockname()[1])]) == 2
    assert ("nothing drafts with --draft none" in capsys.readouterr().err) is is_warned


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"specpipe {version('specpipe')}\n"


def test_what_the_encoding_of_a_terminal_lacks_is_shown_as_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is a model's; it may hold anything, on a machine whose locale is old."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with pytest.raises(SystemExit) as ended:
        main(["generate", "a", "--mode", "schnell \N{LATIN SMALL LETTER U WITH DIAERESIS}ber alles"])
    assert ended.value.code == 2
    sys.stdout.write("caf\N{LATIN SMALL LETTER E WITH ACUTE}")
    for stream, wanted in ((out, b"caf\\xe9"), (err, b"schnell \\xfcber")):
        stream.flush()
        assert wanted in stream.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_misspelt_option_is_never_told_of_hidden_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["target-worker", "--parent-fe", "3"]) == 2
    assert "--parent-fd" not in capsys.readouterr().err


def test_every_flag_says_in_our_own_words_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Where typer read the values itself, its validator's words came out."""
    for name, command in commands().items():
        arguments = ["x" for param in command.params if param.param_type_name == "argument"]
        for option in command.params:
            if option.metavar in TEXTS or option.param_type_name == "argument" or getattr(option, "is_flag", False):
                continue
            assert run([name, *arguments, option.opts[0], "nonsense"]) == 2
            said = capsys.readouterr().err
            assert re.fullmatch(rf"error: {option.opts[0]} (must be|needs) [^\n]+\n", said), said


TEXTS = ("TEXT", "FILE", "MODEL", "MODEL|ngram|none", "HOST", "HOST:PORT", "[dns:]HOST:PORT|file:PATH", "A-B")


def commands() -> dict[str, Any]:
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_demo_models_prints_target_then_draft(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo-models"]) == 0
    assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == ["target", "draft"]


@pytest.mark.parametrize("redirection", [">/dev/full", ">&-", ">&- 2>&-"])
def test_an_output_that_cannot_be_written_is_no_stack_trace(redirection: str) -> None:
    command = f"{sys.executable} -m specpipe --help {redirection}"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    if redirection == ">/dev/full":
        assert (ended.returncode, ended.stderr) == (1, "error: the output cannot be written: No space left on device\n")
    else:
        assert (ended.returncode, ended.stderr) == (0, "")


def test_ctrl_c_while_modules_load_is_no_stack_trace() -> None:
    interrupt = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    code = f"import sys\nfrom specpipe.cli import main\n{LOADS_FIRST}\nmain()"
    command = [sys.executable, "-c", code.replace("INTERRUPT", repr(interrupt))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")


# Interrupts in the middle of the import of specpipe.cli.app.
LOADS_FIRST = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "specpipe.cli.app":
            exec(INTERRUPT)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    "source",
    [
        "workers",
        "dns:workers",
        "dns:workers:0",
        "dns::6001",
        "workers:70000",
        "two words:1",
        "fd00::7:6001",
        "workers:٣",
        "[workers]:1",
    ],
)
@pytest.mark.parametrize("flag", ["--target", "--draft"])
def test_a_worker_is_an_address_or_a_name_with_a_port(
    flag: str, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["coordinator", "--target", "127.0.0.1:1", flag, source]) == 2
    assert capsys.readouterr().err == f"error: {flag} needs [dns:]HOST:PORT or file:PATH, got {source!r}\n"
