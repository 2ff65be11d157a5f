"""Files of this package that pictures carry with them, and what they have of each tone.

Owns: reading them, once. Must not know: layout.
"""

from __future__ import annotations

import functools
from importlib import resources

from specpipe.timeline.model import Tone

HATCHED = (Tone.WASTED, Tone.EXPOSED, Tone.QUEUED)


@functools.cache
def asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
