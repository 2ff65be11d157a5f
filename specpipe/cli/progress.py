"""A bar for each process while models load, on stderr, so that stdout holds answers only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from specpipe.launcher.service import OnProgress


@contextmanager
def loading_bars() -> Iterator[OnProgress]:
    """Yields what a launcher calls with (process, "loading" | "ready"). Draws nothing where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<18}"), BarColumn(), TextColumn("{task.fields[state]:<7}"))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def on_progress(name: str, state: str) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=None, state=state)
            elif state == "ready":
                progress.update(tasks[name], total=1, completed=1, state=state)

        yield on_progress
