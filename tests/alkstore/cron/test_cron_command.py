"""A command is a process group: what it says is kept and bounded, and nothing of it is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from alkstore.cron import command as module
from alkstore.cron.command import OUTPUT_BYTES, CommandFailed, Output, run_command

pytestmark = pytest.mark.skipif(os.name != "posix", reason="process groups")

WITHIN_S = 20.0
"""A loaded machine needs its time."""

FOREVER = "sleep 1000 & echo $$ $!; wait"
"""For a shell: says its own pid and its child's, and waits."""


@define(eq=False)
class Heard(Output):
    """Tells when a line was said."""

    line: trio.Event = field(factory=trio.Event, init=False)

    def add(self, part: bytes) -> None:
        Output.add(self, part)
        if b"\n" in part:
            self.line.set()

    def numbers(self) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", self.text())]


async def run(command: str | Sequence[str], output: Output | None = None, **options: Any) -> str:
    """Run a command, a text in the shell; return what it said."""
    output = Output() if output is None else output
    given = {"shell": isinstance(command, str), "env": {}, "cwd": None, "starting": trio.CapacityLimiter(1), **options}
    with trio.fail_after(WITHIN_S):
        await run_command(command, output=output, **given)
    return output.text()


async def cancelled_once_it_speaks(command: str | Sequence[str], **options: Any) -> Heard:
    """Run a command, cancel it when it has said a line, and return its output."""
    output = Heard()
    with trio.fail_after(WITHIN_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(run, command, output, **options))
            await output.line.wait()
            nursery.cancel_scope.cancel()
    return output


def lives(pid: int) -> bool:
    """Whether the process is there and no zombie, which only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pids: Sequence[int]) -> bool:
    """Whether these processes end, as SIGKILL has told them to."""
    with trio.move_on_after(5):
        while any(lives(pid) for pid in pids):  # noqa: ASYNC110 - nobody tells of a grandchild's end
            await trio.sleep(0.01)
    return not any(lives(pid) for pid in pids)


# --------------------------------------------------------------------------------------------------------- output


async def test_what_it_writes_is_kept_in_order_errors_too() -> None:
    assert await run("echo one; echo two >&2; echo three") == "one\ntwo\nthree\n"


async def test_a_command_that_says_nothing_has_no_output() -> None:
    assert await run(["true"]) == ""


async def test_arguments_are_passed_as_they_are() -> None:
    assert await run(["printf", "%s|", "a b", "$HOME", "*", "", "ä\N{SNOWMAN}"]) == "a b|$HOME|*||ä\N{SNOWMAN}|"


async def test_a_shell_reads_its_text() -> None:
    assert await run("printf '%s' \"$((6 * 7))\" | cat") == "42"


async def test_of_much_output_the_end_is_kept_and_the_rest_counted() -> None:
    text = await run("yes 0123456789abcde | head -c 10000000; echo; echo the end")
    first, _, rest = text.partition("\n")
    assert first == f"[{10_000_009 - OUTPUT_BYTES} bytes before this were dropped]"
    assert len(rest) == OUTPUT_BYTES
    assert rest.endswith("\nthe end\n")


async def test_binary_output_is_kept_as_far_as_it_is_text() -> None:
    assert await run(["printf", r"a\377\000b"]) == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b"


async def test_a_character_that_is_cut_in_two_does_no_harm() -> None:
    output = Output()
    output.add("é".encode() * OUTPUT_BYTES + b"x")
    text = output.text()
    assert text.endswith("éx")
    assert len(text.encode()) < OUTPUT_BYTES + 100


@given(st.lists(st.binary(max_size=OUTPUT_BYTES // 2), max_size=8))
def test_the_end_is_kept_however_it_comes_in_parts(parts: list[bytes]) -> None:
    output = Output()
    for part in parts:
        output.add(part)
    whole = b"".join(parts)
    dropped = max(0, len(whole) - OUTPUT_BYTES)
    expected = whole[dropped:].decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
    assert output.text() == (f"[{dropped} bytes before this were dropped]\n" if dropped else "") + expected
    assert sum(map(len, output._parts)) < OUTPUT_BYTES + OUTPUT_BYTES // 2


# ----------------------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("code", [1, 3, 255])
async def test_another_exit_code_than_zero_is_a_failure(code: int) -> None:
    output = Output()
    with pytest.raises(CommandFailed, match=f"^exit code {code}$"):
        await run(f"echo half; exit {code}", output)
    assert (output.exit_code, output.text()) == (code, "half\n")


async def test_an_exit_code_of_zero_is_a_success() -> None:
    output = Output()
    await run(["true"], output)
    assert output.exit_code == 0


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (15, "SIGTERM"), (40, "signal 40")])
async def test_a_command_that_a_signal_ends_has_failed(number: int, name: str) -> None:
    output = Output()
    with pytest.raises(CommandFailed, match=f"^ended by {name}$"):
        await run(f"kill -{number} $$", output)
    assert output.exit_code == -number


async def test_a_program_that_is_not_there_cannot_be_started() -> None:
    output = Output()
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        await run(["no-such-program"], output)
    assert output.exit_code is None


async def test_a_file_that_is_no_program_cannot_be_started(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a program")
    with pytest.raises(PermissionError, match=r"notes\.txt"):
        await run([str(file)])


async def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        await run(["true"], cwd=str(tmp_path / "nowhere"))


# ---------------------------------------------------------------------------------------------------- surroundings


async def test_its_environment_is_ours_with_its_own_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "1")
    monkeypatch.setenv("BOTH", "1")
    assert await run("echo $OURS $BOTH $ITS", env={"BOTH": "2", "ITS": "a=b c"}) == "1 2 a=b c\n"
    assert os.environ["BOTH"] == "1"


async def test_it_runs_in_the_folder_that_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "here").touch()
    assert await run(["ls"], cwd=str(tmp_path)) == "here\n"


async def test_its_standard_input_is_empty() -> None:
    assert await run(["cat"]) == ""


async def test_it_leads_a_session_and_a_group_of_its_own() -> None:
    fields = (await run(["cat", "/proc/self/stat"])).split()
    pid, group, session = fields[0], fields[4], fields[5]
    assert pid == group == session


# ------------------------------------------------------------------------------------------------- nothing is left


async def test_a_cancelled_command_is_asked_to_end() -> None:
    output = await cancelled_once_it_speaks(FOREVER)
    assert output.exit_code == -signal.SIGTERM
    assert await gone(output.numbers())


async def test_what_it_says_on_its_way_out_is_kept() -> None:
    output = await cancelled_once_it_speaks(
        "trap 'echo cleaned up; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    )
    assert output.text().endswith("\ncleaned up\n")
    assert output.exit_code == 0


async def test_a_command_may_say_much_on_its_way_out() -> None:
    """A pipe that nobody reads would hold it until it is killed."""
    output = await cancelled_once_it_speaks(
        "trap 'yes | head -c 1000000; echo done; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    )
    assert output.text().endswith("done\n")
    assert output.exit_code == 0


async def test_a_command_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TERMINATE_S", 0.2)
    output = await cancelled_once_it_speaks("trap '' TERM; sleep 1000 & echo $$ $!; while :; do wait; done")
    assert output.exit_code == -signal.SIGKILL
    assert await gone(output.numbers())


async def test_a_grandchild_that_does_not_listen_is_killed_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TERMINATE_S", 0.2)
    output = await cancelled_once_it_speaks("(trap '' TERM; sleep 1000 & echo $!; while :; do wait; done) & wait")
    assert output.exit_code == -signal.SIGTERM
    assert await gone(output.numbers())


SLOW = "trap 'sleep 0.3; echo cleaned up; exit' TERM; echo $$ ready; while :; do sleep 0.05; done"
"""Needs a moment to end when it is asked to."""


async def test_a_child_may_clean_up_although_the_command_itself_ends_at_once() -> None:
    """As in ``sh -c "program; echo done"``: the shell dies of the signal, and the program handles it."""
    output = await cancelled_once_it_speaks(f"({SLOW}) & wait")
    assert output.exit_code == -signal.SIGTERM
    assert output.text().endswith("\ncleaned up\n")


@pytest.mark.parametrize("left", [module.KILLED_S, 0, -1])
async def test_a_command_whose_time_is_over_is_killed_at_once(left: float) -> None:
    output = await cancelled_once_it_speaks(SLOW, time_left=lambda: left)
    assert output.exit_code == -signal.SIGKILL
    assert "cleaned up" not in output.text()
    assert await gone(output.numbers())


async def test_a_command_may_clean_up_for_as_long_as_there_is_time() -> None:
    output = await cancelled_once_it_speaks(SLOW, time_left=lambda: module.TERMINATE_S)
    assert output.text().endswith("\ncleaned up\n")


async def test_what_a_command_leaves_running_in_its_group_is_killed_when_it_ends() -> None:
    output = Heard()
    began = trio.current_time()
    await run("sleep 1000 & echo $!", output)
    assert trio.current_time() - began < 5
    assert await gone(output.numbers())


async def test_a_daemon_that_has_left_the_group_holds_nobody_up(tmp_path: Path) -> None:
    """It has its own session, and so it lives on: this is how a daemon is made."""
    daemon = int(
        await run(
            "setsid sh -c 'echo $$ >pid; exec sleep 1000' & while [ ! -s pid ]; do sleep 0.05; done; cat pid",
            cwd=str(tmp_path),
        )
    )
    try:
        assert lives(daemon)
    finally:
        os.kill(daemon, signal.SIGKILL)


async def test_commands_leave_no_open_files_behind() -> None:
    await run(["true"])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        await run(["true"])
        with pytest.raises(FileNotFoundError):
            await run(["no-such-program"])
        with trio.move_on_after(0):
            await run(["sleep", "1000"])
    assert len(os.listdir("/proc/self/fd")) == before


# ----------------------------------------------------------------------------------------------------------- starts


async def test_a_limited_number_of_commands_is_being_started_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    starting = most = 0
    counting, two = threading.Lock(), threading.Barrier(2, timeout=WITHIN_S)
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen

    def counted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        nonlocal starting, most
        with counting:
            starting += 1
            most = max(most, starting)
        two.wait()
        try:
            return start(*args, **options)
        finally:
            with counting:
                starting -= 1

    monkeypatch.setattr(subprocess, "Popen", counted)
    limiter = trio.CapacityLimiter(2)

    async def one() -> None:
        await run(["true"], starting=limiter)

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(one)
    assert most == 2


@pytest.mark.parametrize("pidfd", [True, False], ids=["pidfd", "thread"])
async def test_the_programs_own_threads_may_all_be_taken(monkeypatch: pytest.MonkeyPatch, pidfd: bool) -> None:
    """T05: whoever holds them may be waiting for this very command."""
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    programs = trio.to_thread.current_default_thread_limiter()
    monkeypatch.setattr(programs, "total_tokens", 1)
    async with programs:
        assert await run("echo here; exit 0") == "here\n"
        heard = await cancelled_once_it_speaks(FOREVER)
    assert heard.exit_code == -signal.SIGTERM
    assert await gone(heard.numbers())


async def test_where_nobody_is_told_how_a_command_ends_none_is_started(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(RuntimeError, match="ignores SIGCHLD"):
            await run(["touch", str(tmp_path / "file")])
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore:subprocess:ResourceWarning")
async def test_what_cannot_be_killed_holds_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another user's by now, as after sudo, or hangs in the kernel."""

    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(module, "TERMINATE_S", 0.3)
    with monkeypatch.context() as powerless:
        powerless.setattr(os, "killpg", refused)
        heard = await cancelled_once_it_speaks(FOREVER)
    assert heard.exit_code is None
    assert heard.text().endswith("[it could not be killed, and was left behind]\n")
    for pid in heard.numbers():
        os.kill(pid, signal.SIGKILL)
    assert await gone(heard.numbers())


async def test_a_command_that_is_cancelled_before_its_turn_is_never_started(tmp_path: Path) -> None:
    limiter = trio.CapacityLimiter(1)
    async with limiter, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: run(["touch", str(tmp_path / "file")], starting=limiter))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert os.listdir(tmp_path) == []
