"""torch's own way to resume: get_state_dict of a new optimizer, torch.distributed.checkpoint into
it, set_state_dict. The run goes on as if it had not stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import parallelkit as pk
from parallelkit.testing import run_ranks

WAYS = {
    "parts": StateDictOptions(),
    "whole": StateDictOptions(full_state_dict=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}


def make(seed: int, one_pass: bool, **options: Any) -> tuple[nn.Module, pk.ShardedAdamW]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(5, 70), nn.Linear(70, 3))
    wrapped = pk.DataParallel(model)
    data_parallel = wrapped if one_pass else None
    return wrapped, pk.ShardedAdamW(
        model.parameters(), lr=0.01, data_parallel=data_parallel, **options
    )


def train(model: Any, optimizer: pk.ShardedAdamW, steps: range, rank: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = ranks.random(step, rank, (4 + rank, 5), torch.float32)
        model.backward(model(x).square().mean(), weight=len(x))
        optimizer.step()


def get_parts(
    model: nn.Module, optimizer: pk.ShardedAdamW, way: StateDictOptions
) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer, options=way)
    return {"model": of_model, "optimizer": of_optimizer}


def resume(group: pk.Group, path: str, one_pass: bool, options: dict[str, Any]) -> list[str]:
    """The digest of an uninterrupted run, and of those that torch resumed."""
    model, optimizer = make(1, one_pass, **options)
    train(model, optimizer, range(3), group.rank)
    for name, way in WAYS.items():
        parts = get_parts(model, optimizer, way)
        dcp.save(parts, checkpoint_id=f"{path}/{name}")
    train(model, optimizer, range(3, 6), group.rank)
    digests = [ranks.digest(list(model.parameters()))]
    for name, way in WAYS.items():
        model, optimizer = make(2, one_pass, **options)
        parts = get_parts(model, optimizer, way)
        dcp.load(parts, checkpoint_id=f"{path}/{name}")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
            options=way,
        )
        train(model, optimizer, range(3, 6), group.rank)
        digests.append(ranks.digest(list(model.parameters())))
    return digests


@pytest.mark.parametrize("one_pass", [False, True], ids=["averaged", "one pass"])
@pytest.mark.parametrize("size", [1, 2])
def test_torch_resumes_a_run_to_the_bit(tmp_path: Path, size: int, one_pass: bool) -> None:
    found = run_ranks(resume, size, str(tmp_path), one_pass, {"amsgrad": size == 2})
    assert ranks.same([digest for told in found for digest in told])
