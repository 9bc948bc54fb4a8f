"""Everything that the README and the documents show as Python is run, or is a copy of an example that is run."""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import io
import re
import types
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from alkstore import open_store
from alkstore.clock import TrioClock
from tests.docs.blocks import ROOT, Block, blocks, included

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

SNIPPETS_S = 86_400.0
"""A document that waits for longer than this, in virtual time, waits for ever."""

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


async def _run(block: Block, names: dict[str, Any]) -> str:
    """Run a block as the body of an async function whose variables the next block sees; return what it prints."""
    source = "\n" * (block.line - 1) + block.text  # so that a traceback shows the document's own line
    code = compile(source, str(block.document), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = types.FunctionType(code, names)()
        if inspect.iscoroutine(result):
            await result
    return printed.getvalue()


@documents
def test_every_snippet_runs_in_the_order_of_the_document(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = list(blocks(document))

    async def main() -> None:
        with trio.fail_after(SNIPPETS_S):
            await run_all()

    async def run_all() -> None:
        async with (
            open_store(":memory:", inline=True, clock=TrioClock(), leadership_ttl=86_400) as store,
            trio.open_nursery() as nursery,
        ):
            names: dict[str, Any] = {"store": store, "nursery": nursery, "__name__": "snippets"}
            names["__builtins__"] = builtins  # as `exec` adds them: formatting a datetime imports by them
            for index, block in enumerate(found):
                if block.language == "python" and block.include is None:
                    printed = await _run(block, names)
                    if index + 1 < len(found) and found[index + 1].shows_output:
                        assert printed == found[index + 1].text
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@documents
def test_an_included_example_is_a_literal_copy(document: Path) -> None:
    for block in blocks(document):
        if block.include is not None:
            assert block.text == included(block.include), f"{document.name}:{block.line} is not {block.include}"


@documents
def test_every_block_says_its_language(document: Path) -> None:
    """A block of another language, or of none, would be passed over by the tests above."""
    assert {block.language for block in blocks(document)} <= {"python", "text", "sh"}


@documents
def test_every_link_inside_the_repository_leads_somewhere(document: Path) -> None:
    source = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", source):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        leads_to = document if not path else document.parent / path
        assert leads_to.exists(), f"{document.name}: {target}"
        if anchor:
            assert anchor in _anchors(leads_to), f"{document.name}: {target}"


def _anchors(document: Path) -> set[str]:
    """The anchors that a Markdown renderer makes of the headings: lower case, no punctuation, dashes for spaces."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
