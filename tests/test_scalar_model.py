"""One weight, numbers a person can check: y = w·x, w = 1, loss ½(w·x - y)², learning rate 0.1."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import parallelkit as pk

ROOT = Path(__file__).parents[1]
Example = tuple[float, float]


def train_one_step(group: pk.Group, shares: list[list[Example]], weighted: bool) -> float:
    """w after one step on this rank's share of the examples."""
    linear = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.ones_(linear.weight)
    model = pk.DataParallel(linear, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.tensor(shares[group.rank], dtype=torch.float64).T[..., None]
    loss = 0.5 * (model(x) - y).square().mean()
    if weighted:
        model.backward(loss, weight=len(x))
    else:
        loss.backward()
    optimizer.step()
    return linear.weight.item()


MINUS_TWO, PLUS_TWO, ZERO = (1.0, 3.0), (2.0, 1.0), (2.0, 2.0)  # examples, by gradient at w = 1


@pytest.mark.parametrize(
    ("shares", "weighted", "expected"),
    [
        pytest.param([[MINUS_TWO], [PLUS_TWO]], True, 1.0, id="-2-and-2-cancel"),
        pytest.param([[MINUS_TWO], [ZERO]], True, 1.1, id="-2-and-0-mean-1-not-the-sum"),
        pytest.param([[MINUS_TWO], [PLUS_TWO] * 3], True, 0.9, id="one-of--2-three-of-2"),
        pytest.param([[MINUS_TWO], [PLUS_TWO] * 3], False, 1.0, id="plain-mean-of-means"),
    ],
)
def test_both_ranks_step_by_the_mean_over_all_examples(shares, weighted, expected):
    found = pk.testing.run_ranks(train_one_step, 2, shares, weighted)
    assert found == [pytest.approx(expected, abs=1e-15)] * 2
    assert found[0] == found[1]


@pytest.mark.parametrize(("share", "expected"), [([MINUS_TWO], 1.2), ([PLUS_TWO], 0.8)])
def test_ranks_that_step_alone_part(share, expected):
    [found] = pk.testing.run_ranks(train_one_step, 1, [share], True)
    assert found == pytest.approx(expected, abs=1e-15)


def readme_example() -> str:
    """The first Python block of the README."""
    return re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]


def test_the_readme_shows_the_example_that_is_there():
    assert readme_example() == (ROOT / "examples" / "scalar_model.py").read_text()


def test_the_readme_example_prints_what_it_says(tmp_path):
    script = tmp_path / "example.py"
    script.write_text(readme_example())
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    # Where Python does not buffer, a line and its end are two writes: another's may come between.
    printed = re.findall(r"rank \d: w = 0\.9(?!\d)|\S+", done.stdout)
    assert sorted(printed) == ["rank 0: w = 0.9", "rank 1: w = 0.9"]
