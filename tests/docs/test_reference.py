"""The reference has every public name, and no other; the guide has every error and every kind of event."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

import alkstore
from alkstore import errors
from tests.docs.blocks import ROOT
from tests.docs.public import MODULES, entries

REFERENCE = (ROOT / "docs" / "reference.md").read_text()
GUIDE = (ROOT / "docs" / "guide.md").read_text()
CODE = [path.read_text() for package in ("alkstore", "actors") for path in (ROOT / package).rglob("*.py")]

BULLET = re.compile(r"^- `([^`]+)`: \S.*$", re.MULTILINE)


def sections(text: str, mark: str) -> Iterator[tuple[str, str]]:
    """Yield each heading of this level with what stands below it; first, with "", what stands before them all."""
    parts = re.split(rf"^{mark} (.+)$", text, flags=re.MULTILINE)
    yield "", parts[0]
    yield from zip(parts[1::2], parts[2::2], strict=True)


def documented() -> dict[tuple[str, str], str]:
    """For each module and each class of it (and "" for the module's own names) the text of its section."""
    found: dict[tuple[str, str], str] = {}
    for module, text in sections(REFERENCE, "##"):
        for title, below in sections(text, "###"):
            of = title if title not in ("Errors", "Exceptions") else ""
            found[module, of] = found.get((module, of), "") + below
    return found


DOCUMENTED = documented()


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_its_line(module: str) -> None:
    missing = []
    for of_module, owner, signature in entries():
        if of_module != module:
            continue
        section = DOCUMENTED.get((module, owner), "")
        is_written = signature in BULLET.findall(section)
        if owner and "(" not in signature:
            is_written = f"`{signature}`" in section
        if not owner and (module, signature) in DOCUMENTED:
            is_written = bool(DOCUMENTED[module, signature].strip())
        if not is_written:
            missing.append(f"{owner}.{signature}".lstrip("."))
    assert missing == [], f"docs/reference.md, section {module}, lacks these, or has them otherwise"


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_has_no_name_that_is_not_public(module: str) -> None:
    public = {(owner, signature) for of_module, owner, signature in entries() if of_module == module}
    written = {
        (owner, line)
        for (of_module, owner), text in DOCUMENTED.items()
        if of_module == module
        for line in BULLET.findall(text)
    }
    classes = {owner for of_module, owner in DOCUMENTED if of_module == module and owner}
    assert written - public == set()
    assert classes - {signature for owner, signature in public if not owner} == set()


def test_the_reference_has_no_other_module() -> None:
    assert {module for module, _ in DOCUMENTED if module} == set(MODULES)


@pytest.mark.parametrize("error", errors.__all__)
def test_the_guide_says_of_every_error_what_to_do(error: str) -> None:
    assert re.search(rf"^\| `{error}` \| .+ \| .* \|$", GUIDE, re.MULTILINE)
    assert getattr(alkstore, error) is getattr(errors, error)


def test_the_guide_tells_of_every_kind_of_event_and_of_no_other() -> None:
    events = GUIDE.partition("### Events")[2].partition("\n### ")[0]
    written = set(re.findall(r"^\| `(\w+)` \|", events, re.MULTILINE))
    published = {
        kind
        for source in CODE
        for kind in re.findall(r"""(?:\btx\.report|\.publish|\bEvent)\(\s*"([a-z_.]+)",""", source)
    }
    assert written == published
