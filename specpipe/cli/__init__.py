"""The command line: `specpipe generate | serve | trace | up | status | down | leave | demo-models`, and
the services by themselves, `specpipe coordinator | draft-worker | target-worker`.

Must not load torch or transformers for itself: a bad flag or folder is refused at once. The service commands load
theirs after their flags are checked.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from specpipe.exit_codes import EXIT_INTERRUPTED


def main() -> NoReturn:
    """Run the command line and exit with its code. Ctrl-C while our own modules load ends the process at once."""
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is signal.default_int_handler:  # else a parent said that it is to be ignored
        # An exception in the middle of an import may come out as any other one.
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    from specpipe.cli.app import main as run_command

    signal.signal(signal.SIGINT, interrupted)
    run_command()


__all__ = ["main"]
