"""Children for the supervisor's tests: each writes in a diary what it does, and fails when told to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import trio

from actors import Backoff, ChildEvent, StopToken

AT_ONCE = Backoff(base=0, cap=0)
"""No backoff, for tests that are about something else."""

Fn = Callable[..., Awaitable[None]]


class Diary(list[str]):
    """What happened, in order."""

    def steady(self, name: str, *, ready_after: float = 0, drain: float = 0) -> Fn:
        """Ready after a while; runs until it is told to stop, and drains."""
        return self.failing(name, ready_after=ready_after, drain=drain)

    def failing(
        self,
        name: str,
        *lives: tuple[float, Exception | None],
        ready_after: float = 0,
        drain: float = 0,
    ) -> Fn:
        """As `steady`, but its first lives end after some seconds, with an error or without."""
        ends: Iterator[tuple[float, Exception | None]] = iter(lives)

        async def run(stop: StopToken, *, task_status: trio.TaskStatus[str]) -> None:
            after, error = next(ends, (None, None))
            self.append(f"{name} starts")
            try:
                await trio.sleep(ready_after)
                task_status.started(name)
                self.append(f"{name} ready")
                if after is None:
                    await stop.wait()
                    await trio.sleep(drain)
                else:
                    await trio.sleep(after)
                    if error is not None:
                        raise error
            finally:
                self.append(f"{name} ends")

        return run


def story(events: list[ChildEvent]) -> list[str]:
    """The events as "child kind", in order."""
    return [f"{event.child} {event.kind}" for event in events]
