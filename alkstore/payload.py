"""Payloads, headers and error texts: what may be stored, and how it is written as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from alkstore.errors import InvalidPayload

__all__ = [
    "JSON",
    "MAX_DEPTH",
    "MAX_ERROR_BYTES",
    "MAX_PAYLOAD_BYTES",
    "decode",
    "describe",
    "encode",
    "encode_headers",
    "storable",
]

JSON: TypeAlias = Any
"""A JSON value: None, bool, int, float, str, a list of JSON values or a dict from str to JSON values."""

MAX_DEPTH = 100
MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
MAX_ERROR_BYTES = 8 * 1024

MAX_DIGITS = 4_300
"""Python reads no longer integer by default (`sys.set_int_max_str_digits`); another process may read it."""

_TOO_LONG = 10**MAX_DIGITS


def encode(value: JSON, name: str = "payload") -> str:
    """Return `value` as JSON text (RFC 8259) that `decode` turns back into an equal value.

    `name` is what its caller calls it.

    Raises:
        InvalidPayload: NaN or infinity, a lone surrogate, a key that is not a str, a tuple or any other type
            that JSON does not have, an integer of more than 4,300 digits, nesting deeper than 100, or more
            than 16 MiB. The text names the path in the value.
    """
    return _encode(value, name)


def encode_headers(headers: object) -> str | None:
    """Return `headers` as JSON text, or None for no headers.

    Raises:
        InvalidPayload: not a flat mapping from str to str, or a text that cannot be stored.
    """
    if headers is None:
        return None
    if not isinstance(headers, Mapping):
        raise InvalidPayload(f"headers must be a mapping from str to str, not {type(headers).__name__}")
    for key, value in headers.items():
        if not isinstance(key, str):
            raise InvalidPayload(f"headers: a key must be a str, not {type(key).__name__}{_shown(key)}")
        if not isinstance(value, str):
            raise InvalidPayload(f"headers[{key!r:.80}] must be a str, not {type(value).__name__}")
    return _encode(dict(headers), "headers") if headers else None


def decode(text: str) -> JSON:
    """Return the value that `encode` wrote as `text`."""
    return json.loads(text)


def describe(error: BaseException) -> str:
    """Return a storable text that names every leaf of `error`; never raises, whatever `error` does."""
    return storable("; ".join(_one_line(leaf) for leaf in _leaves(error)))


def storable(text: object) -> str:
    """Return `text` as both engines can store it: NUL and surrogates replaced, cut at 8 KiB of UTF-8."""
    whole = str.__str__(text) if isinstance(text, str) else _one_line(text)  # not as a subclass of str would have it
    raw = whole.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace")
    if len(raw) <= MAX_ERROR_BYTES:
        return raw.decode()
    return raw[: MAX_ERROR_BYTES - 3].decode(errors="ignore") + "…"


def _encode(value: object, path: str) -> str:
    _check(value, path, 0)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:  # this program set the interpreter's own limit on digits lower than ours
        raise InvalidPayload(f"{path}: {error}") from error
    if (size := len(text.encode())) > MAX_PAYLOAD_BYTES:
        raise InvalidPayload(f"{path} must be at most {MAX_PAYLOAD_BYTES} bytes of JSON, not {size}")
    return text


_Path: TypeAlias = "str | tuple[_Path, object]"
"""Where in a payload: its name, or a key or an index below another path. It becomes text only if something is wrong."""


def _check(value: object, path: _Path, depth: int) -> None:
    if isinstance(value, str):
        if not value.isascii():
            _check_text(value, path)
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise InvalidPayload(f"{_text(path)} must be a finite number, not {value}")
    elif isinstance(value, dict):
        _check_depth(path, depth)
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidPayload(f"{_text(path)}: a key must be a str, not {type(key).__name__}{_shown(key)}")
            if not key.isascii():
                _check_text(key, path, f": the key {key!r:.80}")
            _check(item, (path, key), depth + 1)
    elif isinstance(value, list):
        _check_depth(path, depth)
        for index, item in enumerate(value):
            _check(item, (path, index), depth + 1)
    elif isinstance(value, int):
        if not -_TOO_LONG < value < _TOO_LONG:
            raise InvalidPayload(f"{_text(path)} is an integer of more than {MAX_DIGITS} digits")
    elif value is not None:
        hint = "; use a list" if isinstance(value, tuple | set | frozenset) else ""
        raise InvalidPayload(f"{_text(path)} must be a JSON value, not {type(value).__name__}{hint}")


def _check_depth(path: _Path, depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise InvalidPayload(f"{_text(path)[:200]}… is nested deeper than {MAX_DEPTH} levels")


def _check_text(text: str, path: _Path, of: str = "") -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidPayload(f"{_text(path)}{of} holds a lone surrogate at position {error.start}") from error


def _text(path: _Path) -> str:
    parts: list[str] = []
    while not isinstance(path, str):
        path, key = path
        parts.append(f"[{key!r:.80}]")
    return path + "".join(reversed(parts))


def _shown(key: object) -> str:
    try:
        return f": {key!r:.80}"
    except Exception:  # noqa: BLE001 - a key's own code may fail, or it is a very long int; its type must do
        return ""


def _leaves(error: BaseException) -> Iterator[BaseException]:
    left = [error]  # a stack of our own: groups may be nested deeper than the interpreter's
    while left:
        part = left.pop()
        if isinstance(part, BaseExceptionGroup):
            left.extend(reversed(part.exceptions))
        else:
            yield part


def _one_line(value: object) -> str:
    name = _class_name(value)
    try:
        text = str.__str__(str(value))
    except BaseException as broken:  # noqa: BLE001 - a handler's error may raise anything in its own __str__
        return f"{name} (its text cannot be shown: {_class_name(broken)})"
    if isinstance(value, BaseException):
        return f"{name}: {text}" if text else name
    return text


def _class_name(value: object) -> str:
    name: str = type.__dict__["__name__"].__get__(type(value))  # a metaclass may hide it behind code of its own
    return name
