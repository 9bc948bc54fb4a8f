"""Async context managers that say what to write when ``async with`` was forgotten."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import _AsyncGeneratorContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

__all__ = ["AsyncWith", "async_with"]

P = ParamSpec("P")
T = TypeVar("T")


class AsyncWith(_AsyncGeneratorContextManager[T]):
    """What `contextlib.asynccontextmanager` makes, with better errors; the type checker knows of none of these ways."""

    right_way: str = ""
    """What should have been written."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"{self._advice()}; it has no {name} before")

        def __await__(self) -> Any:
            raise TypeError(self._advice())

        def __enter__(self) -> Any:
            raise TypeError(self._advice())

        def __exit__(self, *_: object) -> None: ...

    def _advice(self) -> str:
        return f"this has to be entered: write `{self.right_way}`"


def async_with(right_way: str) -> Callable[[Callable[P, AsyncIterator[T]]], Callable[P, AsyncWith[T]]]:
    """As `contextlib.asynccontextmanager`; `right_way` is the line that opens the block."""

    def decorate(function: Callable[P, AsyncIterator[T]]) -> Callable[P, AsyncWith[T]]:
        @wraps(function)
        def make(*args: P.args, **kwargs: P.kwargs) -> AsyncWith[T]:
            made: AsyncWith[T] = AsyncWith(function, args, kwargs)  # type: ignore[arg-type]
            made.right_way = right_way
            return made

        return make

    return decorate
