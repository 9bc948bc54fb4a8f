"""Where a server is: a URL that may hold a password, which is shown to nobody."""

from __future__ import annotations

import re
from urllib.parse import unquote

__all__ = ["is_url", "redacted", "refuse_other_addresses"]

_SCHEMES = ("postgresql://", "postgres://")
"""What libpq takes for a URL, as it is written here and no other way."""

_IN_QUERY = re.compile(r"[?&]\w*password=([^&]*)")

_SCHEME = re.compile(r"\s*([a-z][\w+.-]+:/+|(?:file|jdbc|postgres[^/:]*):)", re.IGNORECASE)

_KEY_WORDS = re.compile(
    r"\s*(?:host|hostaddr|port|dbname|user|passfile|service|sslmode)\s*=|(?:.*\s)?password\s*=",
    re.IGNORECASE | re.DOTALL,
)

_LOGIN = re.compile(r"[^/@\s]+:[^/\s]*@[^/\s]+/")


def is_url(target: str) -> bool:
    """Whether this is the URL of a server."""
    return target.startswith(_SCHEMES)


def refuse_other_addresses(target: str) -> None:
    """Raise ValueError for what is no URL, and no path either, but may hold a password: so it is not shown.

    Such a path begins with ``./``, if there is one.
    """
    write = "write postgresql://user@host/database"
    if is_url(target):
        return
    if found := _SCHEME.match(target):
        what = f"a URL that begins with {found[1]!r}: of a PostgreSQL server {write}"
    elif _KEY_WORDS.match(target):
        what = f"libpq's key words: {write}"
    elif _LOGIN.match(target):
        what = f"the address of a server without its postgresql://: {write}"
    else:
        return
    raise ValueError(f"target must be a path, ':memory:' or a postgresql:// URL, not {what}")


def redacted(text: str, url: str) -> str:
    """Return `text` without the password of `url`, which need not be well-formed: libpq quotes what it cannot read."""
    for password in sorted(_passwords(url), key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(password)}(?!\w)", "***", text)
    return text


def _passwords(url: str) -> set[str]:
    """All that may be a password, or a part of one that holds an unquoted ``@``, as written and as meant."""
    login, at, _ = url.partition("://")[2].rpartition("@")
    whole = login.partition(":")[2]
    found = {whole, *whole.split("@")} if at else set()
    found.update(_IN_QUERY.findall(url))
    return {text for password in found for text in (password, unquote(password)) if text}
