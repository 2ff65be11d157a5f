"""Fails unless this environment really has the oldest versions: a test run on the newest ones would prove nothing."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path


def main() -> int:
    """Compare each pin of requirements.txt with what is installed."""
    lines = Path(__file__).with_name("requirements.txt").read_text().splitlines()
    wrong = []
    for line in lines:
        if line.startswith("#") or not line:
            continue
        name, _, wanted = line.partition("==")
        actual = metadata.version(name)
        if not f"{actual}.".startswith(wanted.removesuffix("*").removesuffix(".") + "."):
            wrong.append(f"{name} is {actual}, wanted {wanted}")
    sys.stderr.write("\n".join(wrong) + "\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
