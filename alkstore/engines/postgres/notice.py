"""What the processes tell each other by NOTIFY: which topics have changed, and who says so."""

from __future__ import annotations

import json
from collections.abc import Iterable

__all__ = ["channel", "heard", "notice"]

MAX_NOTICE_BYTES = 7_000
"""The server takes 8,000; more topics than fit are told as "everything"."""


def channel(schema: str) -> str:
    """The name of the channel of a store's schema."""
    return f"alkstore_{schema}"


def notice(topics: Iterable[str], by: str | None = None) -> str:
    """The text that says which topics have changed; `by` tells a process its own notices."""
    text = json.dumps({"by": by, "topics": sorted(topics)})
    return text if len(text) <= MAX_NOTICE_BYTES else json.dumps({"by": by, "topics": None})


def heard(text: str) -> tuple[str | None, list[str] | None]:
    """Return who says so, and which topics have changed; None: nobody knows which. Anybody may say anything here."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    match fields:
        case {"by": str() | None as by, "topics": [*topics]} if all(isinstance(topic, str) for topic in topics):
            return by, topics
        case {"by": str() as by, "topics": None}:
            return by, None
    return None, None
