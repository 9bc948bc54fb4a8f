"""Reads the code blocks of a Markdown file, so that tests can run what a newcomer copies."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

__all__ = ["ROOT", "Block", "blocks", "included"]

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_INCLUDE = re.compile(r"<!-- include: (?P<what>[^>]+?) -->\n\Z")


@frozen
class Block:
    """One fenced block."""

    document: Path
    line: int
    """The line of its first line of text, from 1."""
    language: str
    text: str
    include: str | None
    """What the comment above it says that it is a copy of: a file, or ``file: function``."""
    shows_output: bool
    """It stands right below another block, and nothing is between: it is what that one prints."""


def blocks(document: Path) -> Iterator[Block]:
    """Return the fenced blocks of `document` in their order."""
    source = document.read_text()
    end = 0
    for fence in _FENCE.finditer(source):
        include = _INCLUDE.search(source[: fence.start()])
        yield Block(
            document=document,
            line=source.count("\n", 0, fence.start("text")) + 1,
            language=fence["language"],
            text=fence["text"],
            include=include["what"] if include else None,
            shows_output=end > 0 and fence["language"] == "text" and not source[end : fence.start()].strip(),
        )
        end = fence.end()


def included(what: str) -> str:
    """Return the text of a file of the repository, or of one function of it: ``docs/examples/lock.py: report``."""
    path, _, name = what.partition(": ")
    source = (ROOT / path).read_text()
    if not name:
        return source
    (node,) = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    return "".join(source.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])
