"""From the text of CLUSTER.yaml to a ClusterConfig, or one sentence that says where it is wrong and what fits.

Owns: the reading of YAML and the filling of dataclasses by their annotations. Must not know: what the fields mean.
"""

from __future__ import annotations

import difflib
import enum
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from specpipe.cluster.config import ClusterConfig
from specpipe.errors import ConfigError

MAX_SHOWN: Final = 60  # characters of what stands in the file
_REPR: Final = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 2, MAX_SHOWN, MAX_SHOWN
NEEDS_EXTRA: Final = (
    "{name} is not installed, and `specpipe {command}` needs it: in specpipe's checkout, pip install '.[ray]'"
)


def read_cluster(path: Path, command: str = "up") -> ClusterConfig:
    """Raises ConfigError."""
    try:
        import yaml
    except ImportError:
        raise ConfigError(NEEDS_EXTRA.format(name="PyYAML", command=command)) from None
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_loader())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a date or a number that cannot be one, bytes
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    return fill_cluster(content, str(path))


def _loader() -> type[Any]:
    """YAML's safe loader, which takes the last of several values of a key; this one refuses them."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys: list[Any] = []
            for key_node, _ in node.value:
                key = key_node.value
                if key in keys:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{_shown(key)} is given twice", key_node.start_mark
                    )
                keys.append(key)
            return super().construct_mapping(node, deep=deep)

    return Loader


def fill_cluster(content: Any, file: str) -> ClusterConfig:
    """`content`: what YAML made of the file named `file`. Raises ConfigError."""
    config = _fill(ClusterConfig, {} if content is None else content, file, "")
    assert isinstance(config, ClusterConfig)
    return config


def _fill(kind: type[Any], content: Any, file: str, path: str) -> Any:
    """`path`: keys that led here, each with a dot after it."""
    if not isinstance(content, Mapping):
        raise ConfigError(f"{file}: {path.rstrip('.') or 'the file'} must hold keys and values, got {_shown(content)}")
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind) if f.init]
    for key in content:
        if key not in known:
            raise ConfigError(f"{file}: {path}{_named(key)} is not known{_suggestion(str(key), known)}")
    values = {key: _value(hints[key], value, file, f"{path}{key}") for key, value in content.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{file}: {path}{error}" if path else f"{file}: {error}") from None


def _suggestion(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f": did you mean {close[0]}?" if close else f"; known here: {', '.join(known)}"


def _value(annotation: Any, value: Any, file: str, path: str) -> Any:
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if value is None and NoneType in kinds:
        return None
    (kind,) = (one for one in kinds if one is not NoneType)
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return _fill(kind, {} if value is None else value, file, f"{path}.")
    if get_origin(kind) is Mapping:
        return _amounts(value, file, path)
    return _scalar(kind, value, file, path)


def _amounts(value: Any, file: str, path: str) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{file}: {path} must hold names and amounts, got {_shown(value)}")
    for name in value:
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"{file}: {path} must hold names and amounts, got the name {_shown(name)}")
    return {name: _scalar(float, amount, file, f"{path}.{_named(name)}") for name, amount in value.items()}


def _scalar(kind: Any, value: Any, file: str, path: str) -> Any:
    if get_origin(kind) is Literal:
        read, wanted = _choice(value, get_args(kind)), _one_of(get_args(kind))
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        # NOTE: YAML reads a bare `off` as false.
        choices = {member.value: member for member in kind}
        read, wanted = choices.get("off" if value is False else value, MISSING), _one_of(list(choices))
    else:
        read, wanted = _READERS[kind](value), _WANTED[kind]
    if read is MISSING:
        raise ConfigError(f"{file}: {path} must be {wanted}, got {_shown(value)}")
    return read


def _choice(value: Any, choices: tuple[Any, ...]) -> Any:
    value = "off" if value is False else value
    return value if value in choices else MISSING


def _one_of(choices: Any) -> str:
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def _named(key: Any) -> str:
    """A key as its file has it, unless that is not to be shown."""
    return key if isinstance(key, str) and key.isprintable() and len(key) <= MAX_SHOWN else _shown(key)


def _shown(value: Any) -> str:
    """In a line, however much it is: a few lines of YAML may stand for more than fits into memory."""
    text = _REPR.repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _number(value: Any) -> Any:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return MISSING
    try:
        return float(value) if math.isfinite(value) else MISSING
    except OverflowError:
        return MISSING


_READERS: Final[Mapping[Any, Callable[[Any], Any]]] = {
    str: lambda value: value if isinstance(value, str) else MISSING,
    bool: lambda value: value if isinstance(value, bool) else MISSING,
    int: lambda value: value if isinstance(value, int) and not isinstance(value, bool) else MISSING,
    float: _number,
}
_WANTED: Final = {str: "a text", bool: "true or false", int: "an integer", float: "a number"}
