"""Checkpoints: any world size, exactly, atomically, and nothing damaged is taken."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import random
import shutil
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import nn

import parallelkit as pk
from parallelkit.checkpoint import CheckpointError
from parallelkit.testing import run_ranks


def model_of(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 90), nn.BatchNorm1d(90), nn.Linear(90, 70), nn.Linear(70, 1))
    return model.to(dtype)


def optimizer_of(model: nn.Module, **options: Any) -> pk.ShardedAdamW:
    parameters = list(model.parameters())
    groups = [{"params": parameters[:3], "weight_decay": 0.2}, {"params": parameters[3:]}]
    return pk.ShardedAdamW(groups, lr=0.01, **options)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = ranks.random(step, 0, (6, 5), torch.float64).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def everything(model: nn.Module, optimizer: pk.ShardedAdamW) -> str:
    entries = [e for s in optimizer.state_dict()["state"].values() for e in s.values()]
    return ranks.digest([*model.state_dict().values(), *entries])


def resume(group: pk.Group, path: str, kinds: list[Any], last: int | None) -> list[str]:
    """For each kind of state and dtype: load if something is there, train, save; the hashes."""
    digests = []
    for number, (dtype, kind) in enumerate(kinds):
        folder = Path(path, str(number))
        here = (folder / "current").exists()
        group.barrier()
        model = model_of(9 if here else 1, dtype)
        optimizer = optimizer_of(model, state_dtype=kind)
        first = 0
        if here:
            first = pk.checkpoint.load(folder, model, optimizer)["step"]
        if last is not None:
            train(model, optimizer, range(first, last))
            pk.checkpoint.save(folder, model, optimizer, extra={"step": last})
        digests.append(everything(model, optimizer))
    return digests


KINDS = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, "int8"),
         (torch.float32, torch.bfloat16), (torch.float64, torch.float32)]  # fmt: skip


def test_any_world_size_reads_what_any_other_wrote_and_goes_on_exactly(tmp_path: Path) -> None:
    straight = run_ranks(resume, 1, str(tmp_path / "straight"), KINDS, 6)[0]
    path = str(tmp_path / "in parts")
    for size, last in ((1, 2), (3, 4), (2, 6)):
        found = run_ranks(resume, size, path, KINDS, last)
        assert ranks.same(found)
    assert found[0] == straight
    assert run_ranks(resume, 1, path, KINDS, None)[0] == straight
    assert len(list(Path(path, "0").iterdir())) == 2, "current and one version"


def reorder(group: pk.Group, path: str) -> list[bool]:
    """Write with one order of memory, read with another; whether state and values are the same."""
    found = []
    orders = (torch.channels_last, torch.contiguous_format)
    for order, other in (orders, orders[::-1]):
        layers = (nn.Linear(9000, 2), nn.Conv2d(6, 50, 3), nn.Conv2d(50, 7, 1))  # cut within a row
        models = [nn.Sequential(*copy.deepcopy(layers)) for _ in range(2)]
        models[0].to(memory_format=order)
        models[1].to(memory_format=other)
        optimizers = [pk.ShardedAdamW(m.parameters()) for m in models]
        for i, p in enumerate(models[0].parameters()):
            p.grad = ranks.random(i, 0, tuple(p.shape), torch.float32)
        optimizers[0].step()
        pk.checkpoint.save(path, models[0], optimizers[0])
        pk.checkpoint.load(path, models[1], optimizers[1])
        assert models[1][1].weight.stride() != models[0][1].weight.stride()
        found.append(everything(models[0], optimizers[0]) == everything(models[1], optimizers[1]))
    return found


def test_the_order_of_memory_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    for size in (1, 4):
        assert all(all(same) for same in run_ranks(reorder, size, str(tmp_path)))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = model_of(1)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    pk.checkpoint.save(tmp_path / "c", model, optimizer, extra=[1, "two"])
    return tmp_path / "c"


def load(path: Path, model: nn.Module | None = None) -> str:
    """The error's text; fails where anything was changed."""
    model = model or model_of(2)
    optimizer = optimizer_of(model)
    before = everything(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        pk.checkpoint.load(path, model, optimizer)
    assert everything(model, optimizer) == before
    return str(caught.value)


def test_damaged_files_are_named_and_nothing_is_loaded(saved: Path) -> None:
    files = sorted(p for p in saved.rglob("*") if p.is_file())
    assert len(files) == 4
    for file in files:
        whole = file.read_bytes()
        for damaged in (whole[: len(whole) // 2], whole[:-40] + b"!" + whole[-39:], None):
            if damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            assert file.name in load(saved) or "there is no checkpoint" in load(saved)
            file.write_bytes(whole)
    assert pk.checkpoint.load(saved, model_of(2)) == [1, "two"]


def test_checkpoint_of_another_model_is_refused(saved: Path) -> None:
    other = model_of(2)
    other[3] = nn.Linear(70, 2)
    assert "[2, 70]" in load(saved, other)
    model = model_of(2)
    model.register_buffer("extra", torch.zeros(3))
    assert "model.extra" in load(saved, model)
    pk.checkpoint.save(saved, model_of(1))
    assert "without an optimizer" in load(saved)
    assert "no checkpoint" in load(saved / "elsewhere")


def test_what_json_cannot_hold_is_refused_before_anything_is_written(saved: Path) -> None:
    before = sorted(saved.rglob("*"))
    with pytest.raises(TypeError, match="checkpoint.save: .*set is not JSON serializable"):
        pk.checkpoint.save(saved, model_of(1), extra={1, 2})
    assert sorted(saved.rglob("*")) == before
    assert pk.checkpoint.exists(saved) and not pk.checkpoint.exists(saved / "elsewhere")


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_metadata_cannot_run_code(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the hashes were made to fit."""
    import hashlib

    monkeypatch.chdir(tmp_path)
    metadata = next(saved.glob("version-*/.metadata"))
    metadata.write_bytes(pickle.dumps(Bomb()))
    manifest = metadata.with_name("manifest.json")
    facts = json.loads(manifest.read_bytes())
    content = metadata.read_bytes()
    facts["files"][".metadata"] = [len(content), hashlib.sha256(content).hexdigest()]
    manifest.write_text(json.dumps(facts))
    current = json.loads((saved / "current").read_bytes())
    current["sha256"] = hashlib.sha256(manifest.read_bytes()).hexdigest()
    (saved / "current").write_text(json.dumps(current))
    assert "mkdir" in load(saved)
    assert not Path("exploded").exists()


def train_and_save_for_ever(path: str, began: Connection) -> None:
    """From what is there, each time with the hash of everything as its note."""
    torch.set_num_threads(1)
    model = model_of(1)
    optimizer = optimizer_of(model)
    pk.checkpoint.load(path, model, optimizer)
    began.send(None)
    for step in range(10**6):
        train(model, optimizer, range(step, step + 1))
        pk.checkpoint.save(path, model, optimizer, extra=everything(model, optimizer))


def test_killed_while_it_saves_the_checkpoint_before_is_whole(tmp_path: Path) -> None:
    """At random moments, five of them in a save; what is there holds what its own note says."""
    path = tmp_path / "c"
    model = model_of(1)
    optimizer = optimizer_of(model)
    pk.checkpoint.save(path, model, optimizer, extra=everything(model, optimizer))
    moment = random.Random(0)
    context = multiprocessing.get_context("forkserver")
    killed = in_the_middle = 0
    while killed < 20 or in_the_middle < 5:
        assert killed < 200, "it is killed outside of its saves"
        killed += 1
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=train_and_save_for_ever, args=(str(path), theirs))
        process.start()
        assert ours.poll(60)
        time.sleep(moment.uniform(0.0, 0.06))
        process.kill()
        process.join()
        in_the_middle += len(list(path.iterdir())) > 2
        model = model_of(2)
        optimizer = optimizer_of(model)
        assert pk.checkpoint.load(path, model, optimizer) == everything(model, optimizer)
    pk.checkpoint.save(path, model, optimizer)
    assert len(list(path.iterdir())) == 2, "what the killed ones left is cleared away"


@pytest.mark.parametrize("operation", ["open", "fsync", "replace"])
def test_a_disk_that_fails_leaves_a_whole_checkpoint(
    saved: Path, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(1)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(3))
    whole = {everything(model, optimizer)}
    reader = model_of(2)
    reading = optimizer_of(reader)
    pk.checkpoint.load(saved, reader, reading)
    whole.add(everything(reader, reading))
    for _ in failing_saves(saved, model, optimizer, operation, monkeypatch):
        pk.checkpoint.load(saved, reader, reading)
        assert everything(reader, reading) in whole


@pytest.mark.parametrize("operation", ["open", "fsync", "replace"])
def test_a_first_save_that_failed_is_no_checkpoint_and_the_next_one_works(
    tmp_path: Path, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = model_of(1), tmp_path / "c"
    optimizer = optimizer_of(model)
    for _ in failing_saves(path, model, optimizer, operation, monkeypatch):
        if pk.checkpoint.exists(path):  # it failed when all was done
            pk.checkpoint.load(path, model, optimizer)
            (path / "current").unlink()
            with pytest.raises(CheckpointError, match="the file current is missing"):
                pk.checkpoint.exists(path)
            shutil.rmtree(path)
    pk.checkpoint.load(path, model, optimizer)


def failing_saves(
    path: Path,
    model: nn.Module,
    optimizer: pk.ShardedAdamW,
    operation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """Save where the first use of an operation of the system fails, the second, until none is."""
    right = getattr(os, operation)
    for last in range(100):
        left = last

        def fail(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError("the disk is full")
            return right(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, operation, fail)
            try:
                pk.checkpoint.save(path, model, optimizer)
            except CheckpointError as error:
                assert "the disk is full" in str(error)
            else:
                break
        yield
    assert 0 < last < 99


def test_failure_on_one_rank_is_raised_on_all_and_keeps_the_old(tmp_path: Path) -> None:
    for message in run_ranks(fail_on_rank_1, 2, str(tmp_path)):
        assert "rank 1 of 2" in message


def fail_on_rank_1(group: pk.Group, path: str) -> str:
    model = model_of(1)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(1))
    pk.checkpoint.save(path, model, optimizer)
    if group.rank == 1:
        model.register_buffer("odd", None)
        model.state_dict = lambda: {"odd": object()}  # type: ignore[assignment,method-assign]
    elsewhere = f"{path}-{group.rank}"
    parted = ranks.message_of(
        pk.CollectiveMismatchError, lambda: pk.checkpoint.save(elsewhere, model_of(1))
    )
    assert "rank 1 differs from rank 0: path" in parted
    assert not pk.checkpoint.exists(elsewhere)
    message = ranks.message_of(TypeError, lambda: pk.checkpoint.save(path, model, optimizer))
    other = model_of(2)
    pk.checkpoint.load(path, other, optimizer_of(other))
    return message
