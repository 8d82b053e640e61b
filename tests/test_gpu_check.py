"""bench/gpu_check.py, as far as it needs no GPU: all of it, on tiny sizes and the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import NATIVE

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "bench" / "gpu_check.py"
PARTS = ["build", "tests", "times", "linear", "memcheck", "racecheck"]

sys.path.insert(0, str(SCRIPT.parent))
import gpu_check  # noqa: E402


@pytest.mark.slow
@pytest.mark.skipif(not NATIVE, reason="no native extension")
def test_the_rehearsal_goes_through_every_part(tmp_path):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rehearse"],
        env=os.environ | {"OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [part["name"] for part in report["parts"]] == PARTS
    assert {part["outcome"] for part in report["parts"]} == {"passed"}
    assert report["rehearsal"] and "no figure means anything" in done.stdout
    what = {row["what"] for row in report["times"]["rows"]}
    for ranks in (2, 4, 8):
        assert f"one pass, bf16, fp32 master, {ranks} ranks" in what
        assert any(w.startswith("weighted") and f"{ranks} ranks, Group.empty" in w for w in what)
    assert {"AdamW, fp32, parallelkit", "AdamW, fp32, torch, fused"} <= what
    assert not any("wrong" in row for row in report["times"]["rows"])
    assert len(report["linear"]["rows"]) == 8
    assert len(list(tmp_path.iterdir())) <= 8, "so many files come back"


def test_no_part_finds_the_sources_in_place_of_what_was_built(tmp_path):
    """`python -m` looks where it runs first; a script, where it lies."""
    parts = gpu_check.parts(tmp_path, rehearse=False)
    assert parts[0].folder == ROOT
    for part in parts[1:]:
        built = Path(part.environment["PYTHONPATH"])
        assert f"--build-lib {built}" in " ".join(parts[0].command)
        assert part.folder == built or "-m" not in part.command[:2]
    assert parts[1].folder == built and parts[1].command[1:3] == ["-m", "pytest"]


def part(code: str, seconds: float = 20.0) -> gpu_check.Part:
    return gpu_check.Part("part", seconds, [sys.executable, "-c", code])


def test_a_part_that_fails_is_told_with_what_it_said(tmp_path, capsys):
    failing = part("print('the reason'); raise SystemExit(3)")
    gpu_check.run(failing, tmp_path, time.monotonic() + 20)
    assert not failing.good and failing.outcome == "failed, status 3"
    assert "| the reason" in capsys.readouterr().out
    assert (tmp_path / "part.txt").read_text() == "the reason\n"


def test_a_part_that_hangs_ends_in_time_with_its_children(tmp_path):
    sleep = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); "
    )
    hanging = part(sleep + "p.wait()", seconds=2.0)
    start = time.monotonic()
    gpu_check.run(hanging, tmp_path, time.monotonic() + 20)
    assert time.monotonic() - start < 10 and hanging.outcome == "ended after 2 s"
    child = Path("/proc", hanging.output.strip(), "stat")
    deadline = time.monotonic() + 5
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_nothing_starts_when_the_time_is_over_or_the_program_is_missing(tmp_path):
    late = part("raise SystemExit(0)")
    gpu_check.run(late, tmp_path, time.monotonic() - 1)
    assert late.outcome == "not run: no time left"
    missing = gpu_check.Part("memcheck", 5, ["no-such-program"])
    gpu_check.run(missing, tmp_path, time.monotonic() + 20)
    assert missing.outcome.startswith("did not start") and "no-such-program" in missing.outcome


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(gpu_check, "NEEDED", ("torch", "no-such-package"))
    assert gpu_check.facts(rehearse=False)["missing"] == [
        "Python package no-such-package",
        "program g++",
        "program nvcc",
        "program compute-sanitizer",
        "program nvidia-smi",
    ]


def test_the_whole_fits_into_eight_minutes_and_each_share_into_its_own(tmp_path):
    seconds = {p.name: p.seconds for p in gpu_check.parts(tmp_path, rehearse=True)}
    assert list(seconds) == PARTS
    assert sum(seconds.values()) <= gpu_check.LIMIT <= 480
    assert seconds["build"] <= 120 and seconds["linear"] <= 180
    assert seconds["tests"] + seconds["times"] + seconds["memcheck"] + seconds["racecheck"] <= 180


def test_the_table_shows_what_there_is(tmp_path):
    done = gpu_check.parts(tmp_path, rehearse=True)
    done[1].outcome, done[1].output = "failed, status 1", "...\n3 failed, 90 passed in 9 s"
    times = {
        "copy GB/s": 4300.0,
        "rows": [
            {"what": "AdamW, fp32, torch, fused", "ms": 8.0, "of copy": 0.8},
            {"what": "AdamW, all bf16, stochastic, parallelkit", "ms": 4.0, "of copy": 0.93},
            {"what": "one pass, fp32, 2 ranks", "wrong": 7.0},
            {"what": "one pass, fp32, 4 ranks", "ms": 12.0, "of copy": 0.9, "goal": 0.92},
            {"what": "weighted all-reduce, 1 MiB", "bytes": 2**20, "ms": 1.0, "of copy": 0.9},
        ],
        "left out": ["all-reduce, 8 ranks"],
    }
    text = "\n".join(gpu_check.table(done, times, {"summary": {"bare": {"over torch": 0.98}}}))
    for words in (
        "failed, status 1",
        "3 failed, 90 passed",
        "device copy 4300.0 GB/s",
        "2.00 times as fast as",
        "one pass, fp32, 2 ranks                                  WRONG",
        "90.0%, goal 92%",
        "linear, bare: over torch 0.98",
        "no time for 1: all-reduce, 8 ranks",
    ):
        assert words in text, text
    assert "1 MiB" not in text
