"""The command line: `specpipe generate | serve | demo-models | coordinator | draft-worker | target-worker`.

Must not load torch or transformers for itself: a bad flag or folder is refused at once. The service commands load
theirs after their flags are checked.
"""

from specpipe.cli.app import main

__all__ = ["main"]
