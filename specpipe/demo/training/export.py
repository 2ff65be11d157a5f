"""Writes the trained pair as two model folders: into the package, or elsewhere to try a pair that is not done."""

import argparse
from pathlib import Path

from specpipe import demo
from specpipe.demo.training.models import DRAFT_LAYERS, TARGET_LAYERS, load_checkpoint, save_folder
from specpipe.demo.training.paths import start_logging


def main() -> None:
    start_logging()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=demo.target_folder().parent, help="where target/ and draft/ go")
    parser.add_argument("--draft", default="draft", help="the draft's checkpoint")
    args = parser.parse_args()
    save_folder(load_checkpoint("target", TARGET_LAYERS), args.folder / "target")
    save_folder(load_checkpoint(args.draft, DRAFT_LAYERS), args.folder / "draft")


if __name__ == "__main__":
    main()
