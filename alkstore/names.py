"""What a name may be, checked at every entry point that takes one from a user."""

from __future__ import annotations

import re
import unicodedata

from alkstore.errors import InvalidName, ReservedName

__all__ = ["MAX_NAME_BYTES", "RESERVED_PREFIX", "check_name"]

RESERVED_PREFIX = "__alkstore_"
MAX_NAME_BYTES = 255  # PostgreSQL limits the size of an index row; one rule for both engines

# Default_Ignorable_Code_Point (Unicode Standard, DerivedCoreProperties), which `unicodedata` does not know
_IGNORABLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def check_name(name: object, what: str) -> str:
    """Return `name` as it was given, or raise.

    `what` says whose name it is ("queue", "lock", …), for the error's text. Names are compared byte by byte;
    nothing is normalised.

    Raises:
        InvalidName: not a str, empty or only white space, a control character or a surrogate in it (Unicode
            categories Cc and Cs), or longer than 255 bytes of UTF-8.
        ReservedName: under NFKC_Casefold (Unicode Standard, section 3.13) it begins with ``__alkstore_``.
    """
    if not isinstance(name, str):
        hint = ": give its name" if hasattr(name, "name") else ""
        raise InvalidName(f"a {what} name must be a str, not {type(name).__name__}{hint}")
    if not name.strip():
        raise InvalidName(f"a {what} name must not be empty or only white space: {name!r}")
    for position, character in enumerate(name):
        if unicodedata.category(character) in ("Cc", "Cs"):
            raise InvalidName(
                f"a {what} name must not contain control characters or surrogates: "
                f"U+{ord(character):04X} at position {position} of {name[:80]!r}"
            )
    if (size := len(name.encode())) > MAX_NAME_BYTES:
        raise InvalidName(f"a {what} name must be at most {MAX_NAME_BYTES} bytes of UTF-8: {name[:40]!r}… has {size}")
    if _folded(name).startswith(RESERVED_PREFIX):
        raise ReservedName(f"a {what} name must not begin with {RESERVED_PREFIX!r}, which is the store's own: {name!r}")
    return str.__str__(name)  # of a subclass, such as an Enum, the text itself


def _folded(name: str) -> str:
    """NFKC_Casefold: characters that nobody sees would hide the prefix from the eye, so they go first."""
    visible = _IGNORABLE.sub("", name)
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", visible).casefold())
