"""Which models a command means, and the checks that need no torch."""

from __future__ import annotations

import sys

from specpipe import demo
from specpipe.cli.failure import EXIT_OK
from specpipe.cli.flags import ServiceFlags
from specpipe.engine.folder import check_folder
from specpipe.engine.vocabulary import check_same_vocabulary
from specpipe.launcher.plan import NGRAM, NONE


def demo_models() -> int:
    """Print the folders of the demo pair: target, then draft."""
    sys.stdout.write(f"{demo.target_folder()}\n{demo.draft_folder()}\n")
    return EXIT_OK


def resolve_models(flags: ServiceFlags) -> tuple[str, str]:
    """Target and draft as flags say, else the demo pair's; both checked, and that they fit together.

    A target of one's own without --draft gets the demo draft if it has the demo tokenizer, else its own n-gram lookup.
    Raises ConfigError, UnsupportedModelError or ModelMismatchError.
    """
    target = flags.target or str(demo.target_folder())
    target_model = check_folder(target)
    if flags.draft in (NGRAM, NONE):
        return target, flags.draft
    draft = flags.draft or str(demo.draft_folder())
    draft_model = check_folder(draft)
    if flags.draft is None and draft_model.vocabulary.fingerprint != target_model.vocabulary.fingerprint:
        return target, NGRAM
    check_same_vocabulary(target_model.vocabulary, draft_model.vocabulary)
    return target, draft
