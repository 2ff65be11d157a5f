"""Which models a command means, and the checks that need no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from specpipe import demo
from specpipe.cli.flags import ServiceFlags
from specpipe.engine.folder import ModelFolder, check_folder
from specpipe.engine.parallel.table import check_ranks
from specpipe.engine.vocabulary import Vocabulary, check_same_vocabulary, read_vocabulary
from specpipe.errors import ConfigError
from specpipe.exit_codes import EXIT_OK
from specpipe.launcher.plan import NGRAM, NONE

GPU_FILES: Final = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")  # NVIDIA's driver, Jetson's, AMD's, WSL's


def demo_models() -> int:
    """Print the folders of the demo pair: target, then draft."""
    sys.stdout.write(f"{demo.target_folder()}\n{demo.draft_folder()}\n")
    return EXIT_OK


def resolve_models(flags: ServiceFlags, *, is_drafting: bool) -> tuple[str, str]:
    """Target and draft as flags say, else the demo pair's; both checked, and that they fit together.

    A target of one's own without --draft gets the demo draft if it has the demo tokenizer, else its own n-gram lookup.
    A draft model is looked at only if the service `is_drafting`. Raises ConfigError, UnsupportedModelError or
    ModelMismatchError.
    """
    target = named("--target", flags.target, str(demo.target_folder()))
    folder = check_folder(target)
    _check_ranks(folder, flags.tensor_parallel_size or 1)
    vocabulary = folder.vocabulary
    draft = named("--draft", flags.draft, "") or default_draft(vocabulary)
    if draft in (NGRAM, NONE) or not is_drafting:
        return target, draft
    check_same_vocabulary(vocabulary, check_folder(draft).vocabulary)
    return target, draft


def named(flag: str, model: str | None, default: str) -> str:
    """The model named, else the default. Raises ConfigError for an empty name: that is a variable that was not set."""
    if model is not None and not model.strip():
        raise ConfigError(f"{flag} must name a model, got {model!r}")
    return default if model is None else model


def check_device(device: str) -> None:
    """Raises ConfigError if no GPU is to be seen: torch, which knows for sure, takes seconds to load."""
    if device != "cpu" and not any(map(os.path.exists, GPU_FILES)):
        raise ConfigError(f"--device {device}: this machine has no GPU driver; use --device cpu")


def check_tokenizer_folder(name: str) -> None:
    """Raises ConfigError for a folder that is not there or holds no tokenizer; a hub name is looked up later."""
    path = Path(name).expanduser()
    if name.startswith((".", "/", "~")) and not path.exists():
        raise ConfigError(f"--tokenizer {name}: no such folder")
    if name and path.is_dir() and not (path / "tokenizer.json").is_file() and not list(path.glob("*.gguf")):
        raise ConfigError(f"--tokenizer {name}: it has no tokenizer.json")


def check_ranks_fit(target: str, size: int) -> None:
    """Raises ConfigError, with the numbers, or UnsupportedModelError if the model cannot be split into `size`."""
    if size > 1:
        _check_ranks(check_folder(target), size)


def _check_ranks(folder: ModelFolder, size: int) -> None:
    names = folder.config.get("architectures")
    check_ranks(str(names[0]) if names else None, folder.config, size)


def default_draft(target: Vocabulary) -> str:
    is_demo = target.fingerprint == read_vocabulary(demo.draft_folder()).fingerprint
    return str(demo.draft_folder()) if is_demo else NGRAM
