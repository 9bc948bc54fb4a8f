"""Every program in docs/examples is run as a newcomer runs it: as a process of its own, told to end by a signal."""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

EXAMPLES = ROOT / "docs" / "examples"
ENDS_WITHIN_S = 60
"""A program that has not ended by then will not end."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that makes a file makes it here."""
    monkeypatch.chdir(tmp_path)


def run(example: str, *arguments: str) -> str:
    """Run an example to its end and return what it printed; it must succeed, and complain of nothing."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", str(EXAMPLES / example), *arguments],
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@contextmanager
def running(example: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start an example that runs until it is told to end; at the end of the body it must have ended."""
    with subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "error", "-u", str(EXAMPLES / example), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        too_late = threading.Timer(ENDS_WITHIN_S, process.kill)
        too_late.start()
        try:
            yield process
            assert process.poll() is not None
        finally:
            too_late.cancel()
            process.kill()


def printed(process: subprocess.Popen[str], start: str) -> str:
    """Wait for the next line that begins with `start` and return it."""
    assert process.stdout is not None
    return next(line for line in process.stdout if line.startswith(start))


def end(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Send the signal and return what is printed from here on; the end must be a success."""
    assert process.stdout is not None
    assert process.stderr is not None
    process.send_signal(number)
    rest, complaint = process.stdout.read(), process.stderr.read()
    assert (process.wait(), complaint) == (0, "")
    return rest


def test_every_example_is_tested_here() -> None:
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [path.name for path in EXAMPLES.iterdir() if path.suffix == ".py" and f'"{path.name}"' not in source] == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What main_job.py prints the first and the second time on one file."""
    path = str(tmp_path_factory.mktemp("main_job") / "main.db")
    return run("main_job.py", path, "2.2"), run("main_job.py", path, "2.2")


def test_main_job_says_what_it_does_and_ends_by_itself(runs: tuple[str, str]) -> None:
    first, _ = runs
    fired, skipped, handled, left = totals(first)
    assert "registered: schedule 'greet', @every 1s" in first
    assert "continuing" not in first
    assert fired >= 1
    assert first.count("handled: ") == handled == fired - left
    assert skipped == 0
    assert first.splitlines()[-1].startswith("stopped: cleanly")


def test_main_job_continues_on_the_same_file_when_it_is_started_again(runs: tuple[str, str]) -> None:
    first, second = runs
    fired_before, _, _, left_before = totals(first)
    fired, skipped, handled, left = totals(second)
    assert f"continuing: {fired_before} fired before, 0 skipped" in second
    assert fired >= 1
    assert skipped == 0
    assert handled == fired + left_before - left


def test_main_job_handles_every_boundary_of_one_grid_across_both_runs(runs: tuple[str, str]) -> None:
    handled = re.findall(r"handled: job (\d+), .* of (\S+) UTC", "".join(runs))
    assert len({job for job, _ in handled}) == len(handled)
    handled.sort(key=lambda found: int(found[0]))  # jobs that were caught up with run side by side
    moments = [datetime.strptime(moment, "%H:%M:%S") for _, moment in handled]
    steps = {(later - earlier) % timedelta(days=1) for earlier, later in pairwise(moments)}
    assert steps == {timedelta(seconds=1)}


def totals(output: str) -> tuple[int, ...]:
    """Boundaries fired, boundaries skipped, jobs handled, jobs left for later."""
    found = re.search(r"totals: (\d+) boundaries fired, (\d+) skipped, (\d+) jobs handled, (\d+) left", output)
    assert found, output
    return tuple(map(int, found.groups()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_main_job_stops_cleanly_when_a_signal_comes_first(number: signal.Signals) -> None:
    with running("main_job.py", "main.db", "3600") as process:
        printed(process, "handled: ")
        out = end(process, number)
    assert "stopping: told to by a signal" in out
    assert "stopped: cleanly" in out


def test_first_handles_its_job_and_ends_on_a_signal() -> None:
    with running("first.py") as process:
        assert printed(process, "") == "to alice@example.com: attempt 1 of 3\n"
        assert end(process, signal.SIGINT) == ""


def test_enqueue_stores_what_a_worker_process_then_handles() -> None:
    assert run("enqueue.py", "jobs.db", "cat.png", "notes.txt", "cat.png") == (
        "job 1: cat.png\njob 2: notes.txt\njob 1: cat.png\n2 ready, 0 dead\n"
    )
    with running("worker_process.py", "jobs.db") as process:
        assert {printed(process, "") for _ in range(2)} == {"working\n", "resized cat.png\n"}
        assert end(process, signal.SIGTERM) == "drained\n"
    assert dead_letters("jobs.db") == [(2, "discarded", "Discard: not a PNG image")]


def test_a_worker_process_finishes_what_it_has_begun_before_it_ends() -> None:
    images = [f"{number}.png" for number in range(50)]
    run("enqueue.py", "jobs.db", *images)
    with running("worker_process.py", "jobs.db") as process:
        before = printed(process, "resized ")
        after = end(process, signal.SIGTERM)
    resized = (before + after).count("resized")
    assert after.endswith("drained\n")
    with sqlite3.connect("jobs.db") as connection:
        rows = connection.execute("SELECT state, attempt, count(*) FROM __alkstore_jobs GROUP BY 1, 2").fetchall()
    connection.close()
    assert rows == [(0, 0, 50 - resized)]  # none is leased, and none has lost an attempt


def dead_letters(path: str) -> list[tuple[int, str, str]]:
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT id, reason, error FROM __alkstore_jobs WHERE state = 2").fetchall()
    connection.close()
    return rows


def test_lock_lets_one_after_the_other_in() -> None:
    lines = run("lock.py").splitlines()
    holds = [re.fullmatch(r"(one|another) holds the lock with token (\d+)", line) for line in lines]
    (first, token), (second, later) = [match.groups() for match in holds if match]
    assert {first, second} == {"one", "another"}
    assert int(later) > int(token)
    assert [lines[1], lines[3], lines[4]] == [f"{first} is done", f"{second} is done", "free again: True"]


def test_plain_handlers_give_an_interrupted_job_back_with_its_attempt() -> None:
    assert run("plain_handlers.py") == (
        "counted to 3\ninterrupted: the job goes back, with its attempt\n"
        "the short one: None\nthe long one: ready, attempts used: 0\n"
    )


def test_cron_job_runs_what_is_due_and_what_it_is_told_to_and_tries_again() -> None:
    first = run("cron_job.py", "cron.db", "5")
    assert "run 1: succeeded, exit code 0\nFilesystem" in first
    assert "created, queued, dispatching, running, succeeded\n" in first
    assert "running, failed, queued, dispatching, running, succeeded\n" in first
    ids = [int(id) for id in re.findall(r"^run (\d+): created", first, re.MULTILINE)]
    assert ids == list(range(2, 2 + len(ids)))
    assert f"run {ids[-1] + 1}: " in run("cron_job.py", "cron.db", "0.5")


def test_cron_job_stops_cleanly_when_a_signal_comes_first() -> None:
    with running("cron_job.py", "cron.db", "3600") as process:
        printed(process, "run 2: ")
        assert "run 1: succeeded" in end(process, signal.SIGINT)


@pytest.mark.parametrize(
    ("example", "tests"), [("test_year.py", 1), ("test_cron_year.py", 2), ("test_simulated_app.py", 4)]
)
def test_a_year_passes_as_its_docstring_says(example: str, tests: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLES / example)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{tests} passed" in done.stdout
