"""Where training keeps what it makes: checkpoints, encoded corpus and logs, outside the repository."""

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

WORK_FOLDER = Path.home() / ".cache" / "specpipe" / "demo_training"


def work_path(name: str) -> Path:
    """The path of a file in the work folder, which exists afterwards."""
    WORK_FOLDER.mkdir(parents=True, exist_ok=True)
    return WORK_FOLDER / name


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` so that a reader sees either the old file or the new one, never half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    os.replace(partial, path)


def append_record(name: str, record: dict[str, Any]) -> None:
    """Append one line of JSON, with the time of day, to the log `name` in the work folder."""
    line = json.dumps({"time": time.strftime("%H:%M:%S"), **record})
    with work_path(name).open("a", encoding="utf-8") as log:
        log.write(line + "\n")


def start_logging() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
