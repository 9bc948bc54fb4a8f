"""docs/examples/order_webhook.py: every order arrives once, however unreliable its receiver is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "order_webhook.py"


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", str(EXAMPLE), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_every_order_arrives_and_duplicates_are_recognised() -> None:
    printed = run()
    stored = re.findall(r"shop: order (\d+) is stored", printed)
    taken = re.findall(r"receiver: order-(\d+) taken: (\{.*?\})", printed)
    lost = re.findall(r"receiver: order-(\d+) taken: .* but the answer is lost", printed)
    duplicates = re.findall(r"receiver: order-(\d+) is a duplicate", printed)
    refused = re.findall(r"receiver: order-(\d+) refused", printed)
    failed = re.findall(r"shop: webhook \d+ failed, next attempt at", printed)

    assert stored == [str(n) for n in range(1, 9)]
    assert sorted(number for number, _ in taken) == stored
    assert all(json.loads(body) == {"order": int(number), "total": int(number) * 10} for number, body in taken)
    assert duplicates == lost != []
    assert refused
    assert len(failed) == len(lost) + len(refused)
    assert printed.splitlines()[-2:] == [
        "shop: 8 orders placed, 0 webhooks given up",
        f"receiver: 8 orders taken, {len(duplicates)} duplicates recognised, {len(refused)} refused at first",
    ]


@pytest.mark.parametrize("seed", ["1"])
def test_it_can_be_run_again_on_its_file(tmp_path: Path, seed: str) -> None:
    for _ in range(2):
        assert "receiver: 8 orders taken" in run(str(tmp_path / "shop.db"), seed)
