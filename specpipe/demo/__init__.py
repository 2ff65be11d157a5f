"""Where the demo pair lies: two small models, one tokenizer, and the files they have not been trained on.

Knows paths only. It imports no torch and no transformers, so a process without them can find the tokenizer.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def target_folder() -> Path:
    """The folder of the demo target: config, weights and tokenizer, as `from_pretrained` wants them."""
    return _PACKAGE / "models" / "target"


def draft_folder() -> Path:
    """The folder of the demo draft, distilled from the target; its tokenizer files equal the target's."""
    return _PACKAGE / "models" / "draft"


def held_out_files() -> list[str]:
    """Standard library files neither model was trained on, sorted, as POSIX paths relative to the library's folder.

    They are those of the Python the pair was trained with; another version may lack some.
    """
    return (_PACKAGE / "held_out_files.txt").read_text(encoding="utf-8").splitlines()
