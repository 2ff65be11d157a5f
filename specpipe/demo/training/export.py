"""Writes the trained pair as two model folders, into the package or elsewhere, and the logs beside these scripts."""

import argparse
import json
from pathlib import Path
from typing import Any

from specpipe import demo
from specpipe.demo.training.models import DRAFT_LAYERS, TARGET_LAYERS, load_checkpoint, save_folder
from specpipe.demo.training.paths import start_logging, work_path

_LOG_FOLDER = Path(__file__).resolve().parent / "logs"


def surviving_records(lines: list[str]) -> list[dict[str, Any]]:
    """Log records in order, less those of steps that a resumed run, begun at an earlier checkpoint, made again."""
    records: list[dict[str, Any]] = []
    for line in lines:
        record = json.loads(line)
        while records and records[-1]["minutes"] > record["minutes"]:
            records.pop()
        records.append(record)
    return records


def _write_log(name: str) -> None:
    records = surviving_records(work_path(f"{name}.jsonl").read_text(encoding="utf-8").splitlines())
    _LOG_FOLDER.mkdir(exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    (_LOG_FOLDER / f"{name}.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    start_logging()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=demo.target_folder().parent, help="where target/ and draft/ go")
    args = parser.parse_args()
    save_folder(load_checkpoint("target", TARGET_LAYERS), args.folder / "target")
    save_folder(load_checkpoint("draft", DRAFT_LAYERS), args.folder / "draft")
    for name in ("target", "draft"):
        _write_log(name)


if __name__ == "__main__":
    main()
