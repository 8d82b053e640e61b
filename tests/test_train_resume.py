"""`parallelkit train --save --resume`: a run goes on exactly, and by itself when a rank is lost."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from test_cli import TORCHRUN, run
from test_train import options
from torch import nn

import parallelkit as pk
from parallelkit.cli import main
from parallelkit.errors import InvalidArgumentError
from parallelkit.testing import RanksFailedError, run_ranks
from parallelkit.train import run as train_run
from parallelkit.train.model import ByteGPT
from parallelkit.train.result import Result
from parallelkit.train.run import Options, prepare, train
from parallelkit.train.saving import check_folders

README = Path(__file__).parents[1] / "README.md"


def take_no_time() -> None:
    """Let this process train a smaller model."""
    train_run.ByteGPT = functools.partial(ByteGPT, width=16, depth=1, heads=4)


def train_small(group: pk.Group, options: Options) -> Result:
    take_no_time()
    return train(options, group)


def small(folder: Path, steps: int, **changed: object) -> Options:
    return options(folder, steps=steps, batch=5, micro_batch=256, data=README, **changed)


def assert_same(found: Result, wanted: Result, exactly: bool) -> None:
    if exactly:
        assert found.losses == wanted.losses
        assert (found.digests, found.tokens) == (wanted.digests, wanted.tokens)
        assert found.checks == wanted.checks
    for way in ("parallel", "one process"):  # a plain mean is another at another number of ranks
        assert found.losses[way] == pytest.approx(wanted.losses[way], rel=1e-6), way
    assert len(found.seconds) == len(found.tokens) == len(wanted.seconds)
    assert found.ok


def test_a_run_goes_on_exactly_and_at_any_layout(tmp_path: Path) -> None:
    """To the bit at the same number of ranks; all three ways, wherever they run now."""
    straight = run_ranks(train_small, 2, small(tmp_path, 7))[0]
    folder = tmp_path / "c"
    run_ranks(train_small, 2, small(tmp_path, 3, save=folder))  # checks steps 0, 1 and 2
    for size, tp in ((2, 1), (1, 1), (4, 2)):
        goes_on = small(tmp_path, 7, resume=folder, tp=tp)
        found = run_ranks(train_small, size, goes_on)[0]
        assert_same(found, straight, exactly=size == 2)


def test_layers_split_over_ranks_go_on_exactly_too(tmp_path: Path) -> None:
    straight = run_ranks(train_small, 4, small(tmp_path, 4, tp=2))[0]
    both = {"save": tmp_path / "c", "resume": tmp_path / "c", "tp": 2, "save_every": 1}
    for steps in (2, 4):
        found = run_ranks(train_small, 4, small(tmp_path, steps, **both))[0]
    assert_same(found, straight, exactly=True)
    done = run_ranks(train_small, 1, small(tmp_path, 4, resume=tmp_path / "c"))[0]
    assert done.losses == straight.losses, "nothing was left to do"


def test_a_run_with_other_settings_is_refused(tmp_path: Path) -> None:
    run_ranks(train_small, 1, small(tmp_path, 1, save=tmp_path / "c"))
    for changed, complaint in (
        ({"batch": 4}, "--batch must be as in the run that was saved, 5, got 4"),
        ({"lr": 0.5}, "--lr must be"),
        ({"seed": 3}, "--seed must be"),
        ({"data": Path(__file__)}, "--data must be"),
    ):
        values = {"steps": 2, "batch": 5, "micro_batch": 256, "data": README} | changed
        other = options(tmp_path, resume=tmp_path / "c", **values)
        with pytest.raises(RanksFailedError) as caught:
            run_ranks(train_small, 2, other)
        for outcome in caught.value.outcomes:
            assert isinstance(outcome, InvalidArgumentError)
            assert complaint in str(outcome)


def test_what_is_no_run_to_go_on_from_is_refused(tmp_path: Path) -> None:
    pk.checkpoint.save(tmp_path / "other", nn.Linear(2, 2))
    run_ranks(train_small, 1, small(tmp_path, 2, save=tmp_path / "c"))
    for folder, complaint in (
        ("other", "must hold a checkpoint of `parallelkit train`"),
        ("c", "--steps must be at least the 2"),
    ):
        with pytest.raises(RanksFailedError, match=complaint):
            run_ranks(train_small, 1, small(tmp_path, 1, resume=tmp_path / folder))


def test_folders_are_checked_before_a_rank_starts(tmp_path: Path) -> None:
    full, empty, file = tmp_path / "full", tmp_path / "empty", tmp_path / "file"
    pk.checkpoint.save(full, nn.Linear(1, 1))
    file.write_text("")
    check_folders(full, full)
    check_folders(empty, empty)
    check_folders(empty, full)
    check_folders(None, full)
    for save, resume, complaint in (
        (None, empty, "--resume .*empty must hold a checkpoint"),
        (full, None, "--save .*full must not hold another run's checkpoint; add --resume"),
        (empty, tmp_path, "--resume .* must hold a checkpoint"),
        (file, None, "--save .*file must be a folder"),
    ):
        with pytest.raises(InvalidArgumentError, match=complaint):
            prepare(small(tmp_path, 1, save=save, resume=resume), 1)
    (full / "current").unlink()  # lost, but not what it names
    for save, resume in ((full, full), (None, full), (full, None)):
        with pytest.raises(InvalidArgumentError, match="current is missing.*there is version-"):
            prepare(small(tmp_path, 1, save=save, resume=resume), 1)


def run_that_loses_a_rank() -> None:
    """What torchrun starts: `parallelkit train`, whose rank 1 dies when 5 of its steps are done."""
    take_no_time()
    step_as_usual = train_run.ThreeWays.step

    def step(run: train_run.ThreeWays, number: int, *args: Any) -> None:
        if (number, run.group.rank, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (5, 1, "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        step_as_usual(run, number, *args)

    train_run.ThreeWays.step = step
    sys.exit(main())


@pytest.mark.slow
def test_a_lost_rank_makes_torchrun_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    straight = run_ranks(train_small, 2, small(tmp_path, 9))[0]
    folder, script = tmp_path / "c", tmp_path / "script.py"
    script.write_text("import test_train_resume as t; t.run_that_loses_a_rank()")
    status, text = run(
        *TORCHRUN, "--max-restarts=2", str(script), "train", f"--out={tmp_path}",
        f"--data={README}", "--steps=9", "--batch=5", "--micro-batch=256", "--device=cpu",
        f"--save={folder}", f"--resume={folder}", "--save-every=2",
    )  # fmt: skip
    assert status == 0, text
    assert f"{folder}: nothing saved yet" in text
    assert f"{folder}: going on after step 4 of 9" in text, text
    numbers = json.loads((tmp_path / "train.json").read_text())
    assert numbers["losses"] == straight.losses
    assert numbers["digests"] == straight.digests
    assert numbers["gradients_ok"] and numbers["replicas_ok"]
