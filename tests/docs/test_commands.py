"""The README's two commands are one line each, and `.ci/run` runs those very lines."""

from __future__ import annotations

import os
import re
import subprocess

from tests.docs.blocks import ROOT, blocks

README = ROOT / "README.md"
CI = ROOT / ".ci" / "run"


def commands() -> list[str]:
    return [block.text for block in blocks(README) if block.language == "sh"]


def test_there_are_two_commands_of_one_line_each() -> None:
    assert [command.count("\n") for command in commands()] == [1, 1]


def test_both_begin_with_an_environment_of_their_own() -> None:
    assert all(command.startswith("python3 -m venv .venv && .venv/bin/pip install ") for command in commands())


def test_the_first_runs_the_main_job_and_the_second_the_tests() -> None:
    main_job, tests = commands()
    assert main_job.split("&&")[-1].strip() == ".venv/bin/python docs/examples/main_job.py"
    assert tests.split("&&")[-1].strip().startswith(".venv/bin/python -m pytest")


def test_ci_takes_its_commands_from_the_readme() -> None:
    """What its own pattern finds for each end that it asks for are the two commands, in their order."""
    script = CI.read_text()
    (pattern,) = re.findall(r'grep -E "([^"]+)" README\.md', script)
    ends = re.findall(r"^step .* readme '([^']+)'$", script, re.MULTILINE)
    lines = README.read_text().splitlines()
    patterns = [pattern.replace("$1", end).replace("\\$", "$") for end in ends]
    assert [[line + "\n" for line in lines if re.search(each, line)] for each in patterns] == [[c] for c in commands()]
    assert 'bash -c "$command"' in script


def test_ci_is_a_script_that_can_be_run() -> None:
    assert os.access(CI, os.X_OK)
    subprocess.run(["bash", "-n", str(CI)], check=True)


def test_no_registry_is_named() -> None:
    """Where packages come from is the machine's affair."""
    assert not re.search(r"index-url|pypi\.|https?://", CI.read_text())
    assert not re.search(r"index-url|pypi\.", README.read_text())
