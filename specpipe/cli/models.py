"""Which models a command means, and the checks that need no torch."""

from __future__ import annotations

import sys

from specpipe import demo
from specpipe.cli.failure import EXIT_OK
from specpipe.cli.flags import ServiceFlags
from specpipe.engine.folder import check_folder
from specpipe.engine.vocabulary import Vocabulary, check_same_vocabulary, read_vocabulary
from specpipe.launcher.plan import NGRAM, NONE


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
    target = flags.target or str(demo.target_folder())
    vocabulary = check_folder(target).vocabulary
    draft = flags.draft or default_draft(vocabulary)
    if draft in (NGRAM, NONE) or not is_drafting:
        return target, draft
    check_same_vocabulary(vocabulary, check_folder(draft).vocabulary)
    return target, draft


def default_draft(target: Vocabulary) -> str:
    is_demo = target.fingerprint == read_vocabulary(demo.draft_folder()).fingerprint
    return str(demo.draft_folder()) if is_demo else NGRAM
