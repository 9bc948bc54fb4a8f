"""Which time zones are taken, and when they change."""

from __future__ import annotations

import struct
import time
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import resources
from itertools import pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alkstore.cron import zone as zones
from alkstore.cron.zone import DAY, Span, load_zone, spans
from alkstore.errors import InvalidSpec

NAMES = resources.files("tzdata").joinpath("zones").read_text(encoding="utf-8").split()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """For tests in which the machine has other time zones: nothing is remembered from before or left behind."""
    path = zoneinfo.TZPATH
    ZoneInfo.clear_cache()
    zones._load.cache_clear()
    yield monkeypatch
    zoneinfo.reset_tzpath(path)
    ZoneInfo.clear_cache()
    zones._load.cache_clear()


def refusal(name: object) -> str:
    with pytest.raises(InvalidSpec) as caught:
        load_zone(name)
    assert caught.value.spec is name
    return str(caught.value)


# ------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name",
    [
        "UTC",
        "Europe/Berlin",
        "America/Argentina/Buenos_Aires",
        "America/Port-au-Prince",
        "Australia/Lord_Howe",
        "Etc/GMT+2",
        "Etc/GMT-14",
        "EST5EDT",
        "GMT",
        "EST",
        "CET",
        "Etc/GMT+1",
        "Asia/Calcutta",
    ],
)
def test_a_name_of_the_database_is_a_zone(name: str) -> None:
    assert load_zone(name).key == name


def test_all_names_of_the_database_but_factory_are_zones() -> None:
    assert [name for name in NAMES if name != "Factory" and load_zone(name).key != name] == []


@pytest.mark.parametrize(
    "name",
    [
        "America/New_Yrok",
        "Mars/Phobos",
        "",
        " ",
        "Europe/berlin",
        "europe/Berlin",
        "EUROPE/BERLIN",
        "utc",
        "Europe/Berlin ",
        " Europe/Berlin",
        "Europe/Berlin\n",
        "Europe/Berlin\x00",
        "Europe//Berlin",
        "Europe/Berlin/",
        "/Europe/Berlin",
        "./Europe/Berlin",
        "Europe/../Europe/Berlin",
        "Europe\\Berlin",
        "Europe",
        "America/Argentina",
        "../../etc/passwd",
        "/etc/localtime",
        "/usr/share/zoneinfo/Europe/Berlin",
        "UTC+2",
        "UTC+02:00",
        "+02:00",
        "GMT+2",
        "PST",
        "CEST",
        "CET-1CEST",
        "Z",
        "local",
        "tzdata.zi",
        "zone.tab",
        "zone1970.tab",
        "leapseconds",
        "leap-seconds.list",
        "iso3166.tab",
        "+VERSION",
        "zones",
        "__init__",
        "zoneinfo",
        "Europe/__init__",
        "Europe/Köln",
        "Europe/Berli\u0438",
        "\ud800",
        "x" * 100_000,
        "a/" * 1_000 + "a",
    ],
)
def test_any_other_text_is_refused(name: str) -> None:
    text = refusal(name)
    assert "there is no time zone" in text
    assert "such as 'Europe/Berlin' or 'UTC'" in text
    assert len(text) < 400


@pytest.mark.parametrize(
    "name", ["localtime", "posixrules", "Factory", "posix/Europe/Berlin", "right/Europe/Berlin", "right/UTC", "posix/"]
)
def test_a_zone_that_depends_on_the_host_is_refused(name: str) -> None:
    assert f"{name!r} does not mean the same on every host" in refusal(name)


@pytest.mark.parametrize("name", [0, 2.0, b"UTC", UTC, ["UTC"], ZoneInfo("UTC")])
def test_what_is_no_text_is_refused(name: object) -> None:
    assert "a time zone is a str" in refusal(name)


def test_a_missing_zone_is_said_to_be_missing() -> None:
    assert refusal(None).startswith("the time zone is missing; ")


@given(st.text(max_size=30) | st.sampled_from(NAMES).map(str.lower) | st.sampled_from(NAMES).map(lambda n: f"../{n}"))
@example("zone.tab")
def test_a_text_is_a_zone_or_an_invalid_spec(name: str) -> None:
    try:
        assert load_zone(name).key == name
    except InvalidSpec as error:
        assert error.spec == name  # noqa: PT017 - either outcome is right
    else:
        assert name in NAMES


# -------------------------------------------------------------------------------- where zones live


def test_without_a_database_of_the_system_the_package_serves(elsewhere: pytest.MonkeyPatch) -> None:
    zoneinfo.reset_tzpath([])
    assert load_zone("Europe/Berlin").key == "Europe/Berlin"
    assert "there is no time zone 'PST'" in refusal("PST")
    assert "there is no time zone 'europe/berlin'" in refusal("europe/berlin")


def test_without_any_database_the_refusal_says_so(elsewhere: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> ZoneInfo:
        raise zoneinfo.ZoneInfoNotFoundError(name)

    elsewhere.setattr(zones, "ZoneInfo", nothing)
    assert "the package tzdata brings one" in refusal("Europe/Berlin")


def test_a_file_system_that_ignores_case_does_not_make_a_second_name(elsewhere: pytest.MonkeyPatch) -> None:
    exact = {name.lower(): name for name in NAMES}
    elsewhere.setattr(zones, "ZoneInfo", lambda name: ZoneInfo(exact[name.lower()]))
    assert load_zone("Europe/Berlin").key == "Europe/Berlin"
    for name in ("europe/berlin", "Europe/berlin", "EUROPE/Berlin", "utc"):
        assert "upper and lower case count" in refusal(name)


def test_a_damaged_file_is_refused(elsewhere: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Europe").mkdir()
    (tmp_path / "Europe" / "Berlin").write_bytes(b"TZif2" + b"\0" * 10)
    (tmp_path / "UTC").write_bytes(b"")
    zoneinfo.reset_tzpath([str(tmp_path)])
    refusal("Europe/Berlin")
    refusal("UTC")


def test_a_refusal_is_not_remembered(elsewhere: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Europe").mkdir()
    broken = tmp_path / "Europe" / "Berlin"
    broken.write_bytes(b"")
    zoneinfo.reset_tzpath([str(tmp_path)])
    refusal("Europe/Berlin")
    broken.unlink()
    assert load_zone("Europe/Berlin").key == "Europe/Berlin"


# ------------------------------------------------------------------------------------------- spans


def seconds(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


@pytest.mark.parametrize(
    ("name", "change", "before", "after"),
    [
        ("Europe/Berlin", "2026-03-29T01:00", 3_600, 7_200),
        ("Europe/Berlin", "2026-10-25T01:00", 7_200, 3_600),
        ("Europe/Dublin", "2026-10-25T01:00", 3_600, 0),
        ("Australia/Lord_Howe", "2026-04-04T15:00", 39_600, 37_800),
        ("America/Sao_Paulo", "2018-11-04T03:00", -10_800, -7_200),
        ("Pacific/Apia", "2011-12-30T10:00", -36_000, 50_400),
        ("Africa/Monrovia", "1972-01-07T00:44:30", -2_670, 0),
        ("America/New_York", "1883-11-18T17:00", -17_762, -18_000),
        ("Europe/Berlin", "2199-03-31T01:00", 3_600, 7_200),
    ],
)
def test_a_change_is_found_to_the_second(name: str, change: str, before: int, after: int) -> None:
    at = seconds(change)
    for start, end in [(at - 1, at + 1), (at - DAY, at + DAY), (at - 40_000, at + 200_000)]:
        assert list(spans(load_zone(name), start, end)) == [Span(start, at, before), Span(at, end, after)]
    assert list(spans(load_zone(name), at, at + DAY)) == [Span(at, at + DAY, after)]
    assert list(spans(load_zone(name), at - DAY, at)) == [Span(at - DAY, at, before)]


@pytest.mark.parametrize("name", ["Etc/GMT-14", "Etc/GMT+12", "Europe/Berlin", "Pacific/Apia"])
@pytest.mark.parametrize("start", [-62_135_596_800, 253_402_300_800 - 2 * DAY])
def test_the_ends_of_the_calendar_have_spans_too(name: str, start: int) -> None:
    found = list(spans(load_zone(name), start, start + 2 * DAY))
    assert [found[0].start, found[-1].end] == [start, start + 2 * DAY]


def transitions(name: str) -> list[tuple[int, int, int]]:
    """Every change of offset that the zone's file lists (RFC 9636): when, from what, to what. All in seconds."""
    data = resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).read_bytes()
    counts = struct.unpack(">6l", data[20:44])
    if data[4:5] >= b"2":  # the second header has 64-bit times
        isutc, isstd, leap, times, types, chars = counts
        data = data[44 + times * 5 + types * 6 + chars + leap * 8 + isstd + isutc :]
        counts = struct.unpack(">6l", data[20:44])
    _, _, _, times, types, _ = counts
    moments = struct.unpack(f">{times}q", data[44 : 44 + 8 * times])
    indexes = data[44 + 8 * times : 44 + 9 * times]
    offsets = [struct.unpack(">l", data[44 + 9 * times + 6 * i : 48 + 9 * times + 6 * i])[0] for i in range(types)]
    changes = []
    for moment, old, new in zip(moments[1:], indexes, indexes[1:], strict=False):
        if offsets[old] != offsets[new]:
            changes.append((moment, offsets[old], offsets[new]))
    return changes


def test_no_zone_changes_twice_between_two_looks_or_by_more_than_a_day() -> None:
    for name in NAMES:
        changes = transitions(name)
        assert all(abs(after - before) <= DAY for _, before, after in changes), name
        assert all(later[0] - earlier[0] > DAY for earlier, later in pairwise(changes)), name


def test_every_change_of_every_zone_is_seen(elsewhere: pytest.MonkeyPatch) -> None:
    zoneinfo.reset_tzpath([])  # the files that are read here are the package's
    wrong = []
    for name in NAMES:
        zone = ZoneInfo(name)
        for at, before, after in transitions(name):
            found = list(spans(zone, at - 30_000, at + 30_000))
            if found != [Span(at - 30_000, at, before), Span(at, at + 30_000, after)]:
                wrong.append((name, at))
    assert wrong == []


def test_a_zone_is_remembered() -> None:
    load_zone("Europe/Berlin")
    start = time.process_time()
    for _ in range(1_000):
        load_zone("Europe/Berlin")
    assert time.process_time() - start < 0.1
