"""The `specpipe` command: its subcommands, and one way out for every error.

Owns: registration and exit codes. Each subcommand's body lives in a module of its own.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn, cast

import typer

from specpipe import __version__
from specpipe.cli.cluster import down, leave, status, up
from specpipe.cli.failure import exit_code_of, say_error
from specpipe.cli.generate import generate
from specpipe.cli.models import demo_models
from specpipe.cli.serve import serve
from specpipe.cli.services import coordinator, draft_worker, target_worker
from specpipe.cli.trace import trace
from specpipe.errors import SpecpipeError
from specpipe.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK

# typer's usage errors derive from click's ClickException; typer >= 0.20 brings its own click, so we reach it from here.
UsageError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[2])

app = typer.Typer(
    name="specpipe",
    help="Distributed, overlapped speculative decoding: the same tokens, sooner.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def say_version(is_asked: bool) -> None:
    if is_asked:
        sys.stdout.write(f"specpipe {__version__}\n")
        raise typer.Exit


@app.callback()
def specpipe(
    *,
    is_version_asked: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=say_version)
    ] = False,
) -> None:
    """Distributed, overlapped speculative decoding: the same tokens, sooner."""


app.command()(generate)
app.command()(serve)
app.command()(trace)
app.command()(up)
app.command()(status)
app.command()(down)
app.command()(leave)
app.command("demo-models")(demo_models)
app.command("coordinator")(coordinator)
app.command("draft-worker")(draft_worker)
app.command("target-worker")(target_worker)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    _open_missing_streams()
    _accept_any_text()
    code = run(list(sys.argv[1:] if arguments is None else arguments))
    try:
        sys.stdout.flush()
    except OSError as error:
        code = _output_failed(error)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """One command. Returns its exit code; what went wrong has been said in one sentence on stderr."""
    command = typer.main.get_command(app)
    try:
        result = command.main(args=arguments or ["--help"], prog_name="specpipe", standalone_mode=False)
        return result if isinstance(result, int) else EXIT_OK
    except SpecpipeError as error:
        say_error(str(error))
        return exit_code_of(error)
    except UsageError as error:
        say_error(usage_sentence(error))
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except OSError as error:
        return _output_failed(error)


def usage_sentence(error: typer.BadParameter) -> str:
    """What typer says, but that hidden options are not suggested for one that is misspelt."""
    options = error.ctx.command.params if error.ctx else []
    hidden = {name for option in options if getattr(option, "hidden", False) for name in option.opts}
    if possibilities := getattr(error, "possibilities", None):
        error.possibilities = [name for name in possibilities if name not in hidden]  # type: ignore[attr-defined]
    return error.format_message()


def _output_failed(error: OSError) -> int:
    """For what the system says of a write that fails; any other error is raised again."""
    if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF):
        raise error
    _drop_stdout()
    if not isinstance(error, BrokenPipeError):  # else who read it has enough
        say_error(f"the output cannot be written: {error.strerror or error}")
    return EXIT_FAILED


def _open_missing_streams() -> None:
    """Started with stdout or stderr closed, the interpreter has None there. What is written there then is lost."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the life of the process


def _accept_any_text() -> None:
    """An answer may hold characters that the terminal's or the file's encoding lacks: they are shown as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """Let the interpreter's last flush succeed although nobody reads."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
