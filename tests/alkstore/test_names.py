"""The name rules."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alkstore.errors import InvalidName, ReservedName
from alkstore.names import MAX_NAME_BYTES, RESERVED_PREFIX, check_name


def casefolded(text: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


prefix_in_disguise = st.tuples(
    *(
        st.sampled_from(
            [c for c in map(chr, range(0x20, 0x1F000)) if unicodedata.category(c) != "Cs" and casefolded(c) == plain]
        )
        for plain in RESERVED_PREFIX
    )
).map("".join)


@pytest.mark.parametrize(
    "name",
    ["q", "a b", " padded ", "ünïcödé", "队列", "🦉", "_alkstore_x", "x__alkstore_", "__alkstore", "a/b:c"],
)
def test_an_ordinary_name_is_accepted(name: str) -> None:
    assert check_name(name, "queue") == name


@pytest.mark.parametrize("name", [None, b"q", 1, True, ["q"], ("q",)])
def test_what_is_not_a_str_is_refused(name: object) -> None:
    with pytest.raises(InvalidName, match=f"queue name must be a str, not {type(name).__name__}"):
        check_name(name, "queue")


@pytest.mark.parametrize("name", ["", " ", "\t\n", "\u00a0\u3000\u2028"])
def test_an_empty_or_blank_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidName, match="empty or only white space"):
        check_name(name, "queue")


@pytest.mark.parametrize("code", [0, 0x0A, 0x1F, 0x7F, 0x85, 0x9F, 0xD800, 0xDFFF])
def test_a_control_character_or_surrogate_is_refused_with_its_place(code: int) -> None:
    with pytest.raises(InvalidName, match=rf"U\+{code:04X} at position 1"):
        check_name(f"a{chr(code)}b", "lock")


@pytest.mark.parametrize("character", ["a", "ü", "队", "🦉"])
def test_the_limit_is_255_bytes_of_utf8(character: str) -> None:
    longest = character * (MAX_NAME_BYTES // len(character.encode()))
    assert check_name(longest, "queue") == longest
    with pytest.raises(InvalidName, match="at most 255 bytes"):
        check_name(longest + character, "queue")


def test_ten_kilobytes_are_refused_with_a_short_text() -> None:
    with pytest.raises(InvalidName) as caught:
        check_name("n" * 10_000, "queue")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "name",
    [
        "__alkstore_outbox:mail",
        "__alkstore_scheduler",
        "__alkstore_",
        "__ALKSTORE_x",
        "__AlkStore_x",
        "__alKstore_x",  # KELVIN SIGN
        "__alkſtore_x",  # LATIN SMALL LETTER LONG S
        "__alkﬆore_x",  # LATIN SMALL LIGATURE ST
        "__alkstore_x",  # full width
        "﹍﹎alkstore﹏x",  # dashed, centreline and wavy low line
        "__𝐚𝕝𝓴𝔰𝚝𝗼𝘳𝙚_x",
        "__ⓐⓛⓚⓢⓣⓞⓡⓔ_x",
    ],
)
def test_the_prefix_is_reserved_in_every_dress(name: str) -> None:
    with pytest.raises(ReservedName, match="__alkstore_"):
        check_name(name, "queue")


@pytest.mark.parametrize(
    "invisible",
    [
        "\u00ad",  # SOFT HYPHEN
        "\u200b",  # ZERO WIDTH SPACE
        "\u2060",  # WORD JOINER
        "\ufeff",  # ZERO WIDTH NO-BREAK SPACE
        "\U000e0061",  # TAG LATIN SMALL LETTER A
        "\u034f",  # COMBINING GRAPHEME JOINER
        "\ufe0f",  # VARIATION SELECTOR-16
        "\U000e0100",  # VARIATION SELECTOR-17
        "\u180b",  # MONGOLIAN FREE VARIATION SELECTOR ONE
        "\u115f",  # HANGUL CHOSEONG FILLER
        "\u3164",  # HANGUL FILLER
        "\uffa0",  # HALFWIDTH HANGUL FILLER
    ],
)
@pytest.mark.parametrize("place", [0, 1, 5, len(RESERVED_PREFIX)])
def test_a_character_that_nobody_sees_does_not_hide_the_prefix(invisible: str, place: int) -> None:
    with pytest.raises(ReservedName):
        check_name(f"{RESERVED_PREFIX[:place]}{invisible}{RESERVED_PREFIX[place:]}x", "queue")


@pytest.mark.parametrize("what", ["queue", "lock", "schedule", "outbox"])
def test_the_error_says_whose_name_it_is(what: str) -> None:
    with pytest.raises(InvalidName, match=f"^a {what} name"):
        check_name("", what)


@pytest.mark.parametrize("error", [InvalidName, ReservedName])
def test_a_bad_name_is_a_value_error_too(error: type[Exception]) -> None:
    assert issubclass(error, ValueError)


@given(st.text(st.characters(), max_size=300))
@example("\ud800")
@example("a" * 255)
def test_a_str_is_accepted_unchanged_or_is_one_of_the_two_errors(name: str) -> None:
    try:
        accepted = check_name(name, "queue")
    except (InvalidName, ReservedName):
        return
    assert accepted == name


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=63))
def test_every_name_within_the_rules_is_accepted(name: str) -> None:
    if name.strip() and "alkstore" not in casefolded(name):
        assert check_name(name, "queue") == name


@given(prefix_in_disguise, st.text(st.characters(exclude_categories=["Cc", "Cs", "M"]), max_size=20))
def test_whatever_casefolds_to_the_prefix_is_reserved(prefix: str, rest: str) -> None:
    assert casefolded(prefix + rest).startswith(RESERVED_PREFIX)
    with pytest.raises(ReservedName):
        check_name(prefix + rest, "queue")
