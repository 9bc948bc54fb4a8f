"""What a supervisor and its children are given is looked at when it is given, not at the first failure."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio

from actors import Backoff, Child, Intensity, StopToken, Supervisor


async def child(stop: StopToken) -> None:
    await stop.wait()


@pytest.mark.parametrize("stop", ["stop", trio.Event, StopToken], ids=["str", "Event", "the class"])
def test_the_stop_token_is_one(stop: Any) -> None:
    with pytest.raises(TypeError, match=r"stop must be a StopToken, made by StopToken\(\)"):
        Supervisor(stop)


def test_on_event_is_a_function() -> None:
    with pytest.raises(TypeError, match="on_event must be a function"):
        Supervisor(on_event=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"intensity": 5}, r"intensity must be an actors\.Intensity, such as Intensity\(.*not 5"),
        ({"backoff": 3}, r"backoff must be an actors\.Backoff, such as Backoff\(.*not 3"),
    ],
)
def test_intensity_and_backoff_are_such(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Child("child", child, **options)


@pytest.mark.parametrize("build", [lambda: Backoff("x"), lambda: Intensity(1, "x")])  # type: ignore[arg-type]
def test_lengths_are_numbers(build: Any) -> None:
    with pytest.raises(ValueError, match=r"must be .* not 'x'"):
        build()


def test_the_stop_timeout_is_a_number() -> None:
    with pytest.raises(ValueError, match="stop_timeout must be 0 or more seconds"):
        Child("child", child, stop_timeout="x")  # type: ignore[arg-type]


async def test_a_forgotten_name_is_asked_for() -> None:
    async with Supervisor() as supervisor:
        with pytest.raises(TypeError, match="needs a name and a function"):
            await supervisor.start(partial(child))  # type: ignore[call-overload]
        supervisor.stop()


async def test_a_coroutine_is_not_its_function() -> None:
    async with Supervisor() as supervisor:
        with pytest.raises(TypeError, match=r"the async function itself, not the result of calling it.*partial"):
            await supervisor.start("child", child(StopToken()))  # type: ignore[call-overload]
        supervisor.stop()


async def test_a_plain_function_is_no_child() -> None:
    def plain(task_status: object) -> None:
        pass

    async with Supervisor(on_event=lambda event: None) as supervisor:
        with pytest.raises(TypeError, match=r"must be an async function: .*plain.* has returned None"):
            await supervisor.start("child", plain)  # type: ignore[arg-type]
        supervisor.stop()
