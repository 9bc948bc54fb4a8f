"""Which way imports may point: read from the source, so that nothing hides behind a module that was loaded before."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("actors", "alkstore")
HANDLES = ("store", "queue", "lock", "schedule", "outbox", "seam", "cron")


def sources() -> dict[str, ast.Module]:
    """Every module of the two packages, by its dotted name."""
    found: dict[str, ast.Module] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def parsed(**modules: str) -> dict[str, ast.Module]:
    """A tree for the tests of these tests: ``__`` stands for the dot."""
    return {name.replace("__", "."): ast.parse(text) for name, text in modules.items()}


TREE = sources()


def imports(name: str, tree: Mapping[str, ast.Module]) -> Iterator[str]:
    """What the module imports anywhere in it, under TYPE_CHECKING and in functions too: modules where known."""
    for node in ast.walk(tree[name]):
        yield from imports_of(node, name, tree)


def imports_of(node: ast.AST, name: str, tree: Mapping[str, ast.Module]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = absolute(name, node, tree)
        for alias in node.names:
            yield inner if (inner := f"{base}.{alias.name}") in tree else base


def absolute(name: str, node: ast.ImportFrom, tree: Mapping[str, ast.Module]) -> str:
    if not node.level:
        return node.module or ""
    is_package = any(other.startswith(f"{name}.") for other in tree)
    parts = name.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def crossings(tree: Mapping[str, ast.Module], of: str, to: tuple[str, ...]) -> list[str]:
    """The imports in `of` that reach into one of `to`."""
    return [
        f"{name} imports {target}"
        for name in tree
        if within(name, of)
        for target in imports(name, tree)
        if any(within(target, package) for package in to)
    ]


def reach(start: str, tree: Mapping[str, ast.Module]) -> set[str]:
    """Everything that the module imports, directly or through other modules of the tree."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for target in imports(waiting.pop(), tree):
            if target not in seen:
                seen.add(target)
                if target in tree:
                    waiting.append(target)
    return seen


def circles(tree: Mapping[str, ast.Module]) -> list[str]:
    """The modules that import themselves, directly or through others."""
    return [name for name in tree if name in reach(name, tree)]


def hidden(tree: Mapping[str, ast.Module]) -> list[str]:
    """The imports of modules of the tree inside functions; an optional package may be imported when it is asked for,
    and so may what stands on it.
    """
    return [
        f"{name}:{inner.lineno}"
        for name, module in tree.items()
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
        if any(needed(target, tree) for target in imports_of(inner, name, tree))
    ]


def needed(target: str, tree: Mapping[str, ast.Module]) -> bool:
    """Whether this is a module of ours that stands on no optional package."""
    below = reach(target, tree) if target in tree else set()
    return target.split(".", 1)[0] in PACKAGES and "psycopg" not in below


# --------------------------------------------------------------------------------------- the house


def test_both_packages_are_read() -> None:
    assert {"actors.ports", "alkstore.errors", "alkstore.sql.jobs", "alkstore.sql"} <= set(TREE)


def test_actors_never_import_the_store() -> None:
    assert crossings(TREE, "actors", ("alkstore",)) == []


def test_sql_imports_neither_trio_nor_an_engine() -> None:
    assert crossings(TREE, "alkstore.sql", ("trio", "anyio", "actors", "alkstore.engines")) == []


@pytest.mark.parametrize("name", [name for name in TREE if within(name, "alkstore.sql")])
def test_sql_does_not_reach_trio_or_an_engine_through_others_either(name: str) -> None:
    reached = reach(name, TREE)
    assert not [module for module in reached if within(module, "trio") or within(module, "anyio")]
    assert not [module for module in reached if within(module, "actors") or within(module, "alkstore.engines")]


def test_engines_know_transactions_and_no_mechanisms() -> None:
    handles = tuple(f"alkstore.{handle}" for handle in HANDLES)
    assert crossings(TREE, "alkstore.engines", ("actors", *handles)) == []


@pytest.mark.parametrize("name", ["errors", "names", "payload", "every", "values"])
def test_values_errors_and_names_stand_below_everything(name: str) -> None:
    below = {f"alkstore.{module}" for module in ("errors", "names", "payload", "every", "values")}
    assert {module for module in reach(f"alkstore.{name}", TREE) if within(module, "alkstore")} <= below


def test_no_import_hides_in_a_function() -> None:
    # the pytest plugin is loaded into every test run of who has the package installed, and must cost nothing there
    assert [found for found in hidden(TREE) if not found.startswith("alkstore.testing.plugin:")] == []


def test_no_import_runs_in_a_circle() -> None:
    assert circles(TREE) == []


# ------------------------------------------------------------------------- that these tests can fail


@pytest.mark.parametrize(
    "text",
    [
        "import alkstore",
        "import alkstore.store as s",
        "from alkstore import store",
        "from alkstore.store import Store",
        "def f():\n import alkstore.store",
        "if TYPE_CHECKING:\n from alkstore.store import Store",
    ],
)
def test_every_way_to_import_is_a_crossing(text: str) -> None:
    assert crossings(parsed(actors__a=text, alkstore__store=""), "actors", ("alkstore",))


@pytest.mark.parametrize("text", ["from . import b", "from .b import x", "from ..a.b import x", "from .. import a"])
def test_a_relative_import_is_resolved(text: str) -> None:
    tree = parsed(p="", p__a="", p__a__b="", p__a__c=text)
    assert list(imports("p.a.c", tree)) == ["p.a" if text == "from .. import a" else "p.a.b"]


def test_a_package_imports_relative_to_itself() -> None:
    assert list(imports("p", parsed(p="from .a import x", p__a=""))) == ["p.a"]


def test_a_name_that_begins_alike_is_another_package() -> None:
    assert crossings(parsed(actors__a="import alkstore_extras"), "actors", ("alkstore",)) == []


def test_a_detour_is_seen() -> None:
    assert "trio" in reach("a", parsed(a="import b", b="from c import x", c="import trio"))


def test_a_circle_is_seen() -> None:
    assert circles(parsed(a="import b", b="from c import x", c="import a", d="import a")) == ["a", "b", "c"]


@pytest.mark.parametrize("head", ["def f():", "async def f():", "class A:\n def f(self):"])
def test_an_import_in_a_function_is_seen(head: str) -> None:
    assert hidden(parsed(actors__a=f"{head}\n  import actors.b"))


def test_an_optional_package_may_be_imported_where_it_is_asked_for() -> None:
    assert hidden(parsed(alkstore__a="def f():\n import apsw")) == []
