"""What is public: the names in `__all__` of what a program imports, and the members of their classes."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

import attrs

__all__ = ["MODULES", "entries"]

MODULES = (
    "alkstore",
    "alkstore.cron",
    "alkstore.seam",
    "alkstore.moving",
    "alkstore.clock",
    "alkstore.testing",
    "actors",
)
"""In the order of the reference. A class that several of them export has its members listed where it comes first."""


def entries() -> Iterator[tuple[str, str, str]]:
    """Yield the module, the class ("" for the module's own names) and the signature of each public name."""
    seen: set[object] = set()
    for name in MODULES:
        module = importlib.import_module(name)
        for public in module.__all__:
            value = getattr(module, public)
            yield name, "", _shown(public, value)
            if inspect.isclass(value) and value not in seen:
                seen.add(value)
                for member in _members(value):
                    yield name, public, member


def _members(of: type) -> Iterator[str]:
    """The members that the project itself gives to the class, in the order in which they are written."""
    named: dict[str, object] = {}
    for owner in reversed(of.__mro__):
        if owner.__module__.partition(".")[0] in ("alkstore", "actors"):
            fields = [field.name for field in attrs.fields(owner)] if attrs.has(owner) else []
            written = {**dict.fromkeys(fields), **vars(owner)}
            named |= {name: written[name] for name in written if not name.startswith("_")}
    for name, value in named.items():
        yield _shown(name, value, bound=True)


def _shown(name: str, value: object, *, bound: bool = False) -> str:
    """``name(a, *, b=1)`` for what can be called, ``name`` for everything else."""
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    if isinstance(value, (type, property, ModuleType)) or not callable(value):
        return name
    parameters = list(inspect.signature(value).parameters.values())[bound:]
    bare = inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters])
    return name + re.sub(r"<[^>]*>|TASK_STATUS_IGNORED", "…", str(bare))
