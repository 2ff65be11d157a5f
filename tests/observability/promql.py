"""Which series and labels a PromQL expression names. No parser: promtool checks that it is PromQL at all."""

from __future__ import annotations

import re
from collections.abc import Iterator

_STRING = r'"(?:[^"\\]|\\.)*"'
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_MATCHERS = rf"\{{(?:[^{{}}\"]|{_STRING})*\}}"
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(rf"(?<![\w.:])({_NAME})?\s*({_MATCHERS})?")
_LABEL = re.compile(rf"({_NAME})\s*(?:=~|!~|!=|=)\s*{_STRING}")
_WORDS = {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring", "group_left", "group_right"}


def selectors(expr: str) -> Iterator[tuple[str, list[str]]]:
    """Each series name and the labels that its matchers name. A selector by __name__ alone has an empty name."""
    bare = _GROUPING.sub(" ", re.sub(r"\[[^\]]*\]", " ", expr))
    for match in _SELECTOR.finditer(bare):
        name, matchers = match.group(1) or "", match.group(2) or ""
        is_function = bare[match.end() :].lstrip().startswith("(") and not matchers
        if (name or matchers) and not is_function and name not in _WORDS:
            yield name, _LABEL.findall(matchers)


def grouping_labels(expr: str) -> set[str]:
    """Those after by, on, ignoring ..."""
    return {label.strip() for labels in _GROUPING.findall(expr) for label in labels.split(",") if label.strip()}
