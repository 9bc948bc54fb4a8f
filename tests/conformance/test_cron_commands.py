"""Commands as runs: how they end is how the run ends, and what they said stays with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio

from alkstore import Store
from alkstore.cron import STANDALONE, RetryPolicy, Run
from tests.conformance.cronning import kinds, run, runs_here, until_over
from tests.conformance.helpers import running

pytestmark = pytest.mark.usefixtures("real_time")

WAITS = "echo ready; exec sleep 1000"


async def ended(store: Store) -> Run:
    """Run the task t by hand, here, to its end."""
    made = await store.cron.run_now("t")
    async with runs_here(store):
        return await until_over(store, made.id)
    raise AssertionError


async def test_a_command_that_ends_well_is_a_run_that_succeeded(store: Store, tmp_path: Path) -> None:
    await store.cron.publish_task(
        "t", command=["sh", "-c", "echo $GREETING; pwd"], env={"GREETING": "hello"}, cwd=str(tmp_path)
    )
    over = await ended(store)
    assert (over.state, over.exit_code, over.error) == ("succeeded", 0, None)
    assert over.output == f"hello\n{tmp_path}\n"
    assert await kinds(store, over) == ["created", "queued", "dispatching", "running", "succeeded"]


async def test_a_text_for_the_shell(store: Store) -> None:
    await store.cron.publish_task("t", command="echo $((6 * 7))", shell=True)  # noqa: S604 - a test
    assert (await ended(store)).output == "42\n"


async def test_a_command_that_does_not_end_well_has_failed(store: Store) -> None:
    await store.cron.publish_task("t", command=["sh", "-c", "echo half; exit 3"])
    over = await ended(store)
    assert (over.state, over.exit_code, over.error, over.output) == (
        "failed",
        3,
        "CommandFailed: exit code 3",
        "half\n",
    )


async def test_a_program_that_is_not_there_is_a_failure_that_names_it(store: Store) -> None:
    await store.cron.publish_task("t", command=["no-such-program"])
    over = await ended(store)
    assert (over.state, over.exit_code, over.output) == ("failed", None, None)
    assert over.error is not None
    assert "FileNotFoundError" in over.error
    assert "no-such-program" in over.error


async def test_output_may_hold_anything(store: Store) -> None:
    """NUL, which PostgreSQL cannot store, what is no UTF-8, and more than is kept."""
    script = "import os; os.write(1, b'a' * 100_000 + bytes(range(256)) + 'end'.encode())"
    await store.cron.publish_task("t", command=[sys.executable, "-c", script])
    over = await ended(store)
    assert over.state == "succeeded"
    assert over.output is not None
    assert over.output.startswith("[34723 bytes before this were dropped]\naaa")
    assert over.output.endswith("\N{REPLACEMENT CHARACTER}end")
    assert "\0" not in over.output


async def test_a_command_that_runs_too_long_is_ended(store: Store) -> None:
    await store.cron.publish_task("t", command=["sh", "-c", WAITS], timeout=0.5)
    over = await ended(store)
    assert (over.state, over.exit_code, over.error) == (
        "timed_out",
        -15,
        "RunTimedOut: ran longer than its timeout of 0.5 s",
    )
    assert over.output in ("ready\n", None)  # a loaded machine may need longer to start it


async def test_a_cancelled_run_ends_its_command(store: Store, tmp_path: Path) -> None:
    script = "trap 'touch ended; exit' TERM; touch begun; while :; do sleep 0.05; done"
    await store.cron.publish_task("t", command=["sh", "-c", script], cwd=str(tmp_path))
    made = await store.cron.run_now("t")
    async with runs_here(store):
        await until_there(tmp_path / "begun")
        assert await store.cron.cancel_run(made.id)
        await until_there(tmp_path / "ended")
    assert (await kinds(store, made))[-1] == "cancelled"


async def until_there(path: Path) -> None:
    with trio.fail_after(30):
        while not await trio.Path(path).exists():  # noqa: ASYNC110 - a file tells nobody
            await trio.sleep(0.02)


async def test_a_command_may_end_by_itself_within_the_grace_of_a_stop(store: Store, tmp_path: Path) -> None:
    await store.cron.publish_task("t", command=["sh", "-c", "touch begun; sleep 0.5; echo done"], cwd=str(tmp_path))
    made = await store.cron.run_now("t")
    async with runs_here(store):
        await until_there(tmp_path / "begun")
    over = await run(store, made.id)
    assert (over.state, over.output) == ("succeeded", "done\n")


async def test_a_command_that_outlives_the_grace_of_a_stop_is_ended_with_its_output_kept(
    store: Store, tmp_path: Path
) -> None:
    await store.cron.publish_task("t", command=["sh", "-c", f"echo half; touch begun; {WAITS}"], cwd=str(tmp_path))
    made = await store.cron.run_now("t")
    async with runs_here(store, grace=0):
        await until_there(tmp_path / "begun")
    over = await run(store, made.id)
    assert (over.state, over.exit_code, over.error) == ("cancelled", -15, "interrupted by shutdown")
    assert over.output is not None
    assert over.output.startswith("half\n")


async def test_each_attempt_has_its_own_output(store: Store, tmp_path: Path) -> None:
    await store.cron.publish_task(
        "t",
        command=["sh", "-c", "echo x >>tries; cat tries; [ $(wc -l <tries) -gt 1 ]"],
        cwd=str(tmp_path),
        retry=RetryPolicy(2, 0),
    )
    over = await ended(store)
    assert (over.state, over.attempt, over.exit_code, over.output, over.error) == ("succeeded", 2, 0, "x\nx\n", None)


async def test_commands_need_no_handler(store: Store) -> None:
    await store.cron.publish_task("t", command=["true"])
    made = await store.cron.run_now("t")
    async with running(store.cron.run, {}, STANDALONE):
        assert (await until_over(store, made.id)).state == "succeeded"
