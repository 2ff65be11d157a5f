"""Models by hub name: the cached copy, or a download.

Owns: the only calls to huggingface_hub. Must not know: what the files mean.
"""

from __future__ import annotations

from pathlib import Path

from specpipe.errors import ConfigError

_PATTERNS = ["*.json", "*.safetensors", "merges.txt", "*.jinja"]


def find(name: str, *, can_download: bool) -> Path:
    """The local snapshot folder of a hub model. Raises ConfigError in one sentence if there is none to be had."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS, local_files_only=True))
    except HFValidationError as error:
        raise ConfigError(f"{name}: neither a folder nor a valid hub name") from error
    except LocalEntryNotFoundError as error:
        if not can_download:
            raise ConfigError(f"{name}: no such folder, and no model of that name in the hub cache") from error
    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS, etag_timeout=10))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"{name}: no such folder, and the hub could not provide it ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else 'no details'}"
