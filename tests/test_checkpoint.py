"""Checkpoints: any world size, exactly, atomically, and nothing damaged is taken."""

from __future__ import annotations

import copy
import hashlib
import io
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
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

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


def load_somewhere(group: pk.Group, path: str) -> str:
    model = model_of(9)
    optimizer = optimizer_of(model, state_dtype=torch.float32)
    pk.checkpoint.load(path, model, optimizer)
    return everything(model, optimizer)


def test_one_rank_reads_what_eight_wrote_and_eight_what_one_wrote(tmp_path: Path) -> None:
    """More ranks than some parameters have blocks: some own nothing of them."""
    for writers, readers in ((8, (1, 5)), (1, (8,))):
        path = str(tmp_path / str(writers))
        written = run_ranks(resume, writers, path, KINDS[:1], 2)
        for size in readers:
            found = run_ranks(load_somewhere, size, f"{path}/0")
            assert found == [written[0][0]] * size


def read_damaged(group: pk.Group, path: str) -> list[str]:
    """What is said where one file after the other was changed; rank 0 does it."""
    heard = []
    for file in sorted(p for p in Path(path).rglob("*") if p.is_file()):
        content = file.read_bytes()
        group.barrier()
        if group.rank == 0:
            file.write_bytes(content[:-40] + b"!" + content[-39:])
        group.barrier()
        model = model_of(9)
        optimizer = optimizer_of(model)
        before = everything(model, optimizer)
        message = ranks.message_of(
            CheckpointError, lambda m=model, o=optimizer: pk.checkpoint.load(path, m, o)
        )
        assert everything(model, optimizer) == before
        heard.append(f"{file.name}: {message}")
        group.barrier()
        if group.rank == 0:
            file.write_bytes(content)
    return heard


@pytest.mark.parametrize("size", [1, 2])
def test_every_file_of_several_ranks_is_checked_by_as_many_as_read(
    size: int, tmp_path: Path
) -> None:
    run_ranks(resume, 5, str(tmp_path), KINDS[:1], 1)
    for heard in run_ranks(read_damaged, size, str(tmp_path / "0")):
        assert len(heard) == 8, "one of each rank, .metadata, manifest.json and current"
        for line in heard:
            name, message = line.split(": ", 1)
            assert name in message, line


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


def test_a_checkpoint_of_another_format_is_refused(saved: Path) -> None:
    (manifest,) = saved.glob("version-*/manifest.json")
    facts = json.loads(manifest.read_bytes())
    manifest.write_text(json.dumps(facts | {"format": facts["format"] + 1}))
    make_hashes_fit(saved)
    assert f"format {facts['format'] + 1}, wanted {facts['format']}" in load(saved)


def test_numbers_and_settings_are_kept_too(tmp_path: Path) -> None:
    """Steps of each parameter, steps that were skipped, and the options of each group."""
    model = model_of(1)
    optimizer = optimizer_of(model, amsgrad=True, maximize=True)
    train(model, optimizer, range(3))
    optimizer.zero_grad()
    next(iter(model.parameters())).grad = torch.full((90, 5), torch.nan)
    with pytest.warns(RuntimeWarning, match="not finite"):
        optimizer.step()
    model[0].weight.grad.fill_(1.0)
    optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.003
    pk.checkpoint.save(tmp_path, model, optimizer)
    other = model_of(2)
    loaded = optimizer_of(other)
    pk.checkpoint.load(tmp_path, other, loaded)
    wanted, found = optimizer.state_dict(), loaded.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    assert [float(s["step"]) for s in found["state"].values()] == [4.0] + [3.0] * 7
    assert loaded.skipped_steps == optimizer.skipped_steps == 1
    assert everything(other, loaded) == everything(model, optimizer)


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


def make_hashes_fit(path: Path) -> None:
    """Say that the files are what was saved."""
    (manifest,) = path.glob("version-*/manifest.json")
    facts = json.loads(manifest.read_bytes())
    for name in facts["files"]:
        content = manifest.with_name(name).read_bytes()
        facts["files"][name] = [len(content), hashlib.sha256(content).hexdigest()]
    manifest.write_text(json.dumps(facts))
    current = json.loads((path / "current").read_bytes())
    current["sha256"] = hashlib.sha256(manifest.read_bytes()).hexdigest()
    (path / "current").write_text(json.dumps(current))


def as_torch_saves(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def named(module: str, name: str) -> bytes:
    """A pickle that is this function or class, called without arguments."""
    return (
        b"\x80\x04"
        + f"\x8c{chr(len(module))}{module}".encode("latin-1")
        + (f"\x8c{chr(len(name))}{name}".encode("latin-1") + b"\x93)R.")
    )


HARMFUL = {
    "a call": (pickle.dumps(Bomb()), "mkdir"),
    "one that the module imports": (named("torch.distributed.checkpoint.metadata", "os"), "os"),
    "one behind a class": (named("torch", "Size.mro"), "torch.Size.mro"),
    "one behind a function": (
        named("torch.serialization", "_get_layout.__globals__"),
        "_get_layout.__globals__",
    ),
    "one that unpickles": (named("torch.serialization", "load"), "load"),
    "torch's own": (named("torch", "load"), "torch.load"),
    "nothing at all": (b"", ".metadata"),
    "something else": (pickle.dumps({1: 2}), ".metadata"),
}


@pytest.mark.parametrize("kind", HARMFUL)
def test_metadata_cannot_run_code(
    kind: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the hashes were made to fit."""
    monkeypatch.chdir(tmp_path)
    content, text = HARMFUL[kind]
    next(saved.glob("version-*/.metadata")).write_bytes(content)
    make_hashes_fit(saved)
    assert text in load(saved)
    assert not Path("exploded").exists()


@pytest.mark.parametrize("as_bytes", [False, True], ids=["as a tensor", "as any object"])
def test_tensors_cannot_run_code(
    as_bytes: bool, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is a bomb, and the metadata and the hashes were made to fit."""
    monkeypatch.chdir(tmp_path)
    (metadata,) = saved.glob("version-*/.metadata")
    told = pickle.loads(metadata.read_bytes())
    content = as_torch_saves(Bomb())
    for place in told.storage_data.values():
        place.offset, place.length = 0, len(content)
    for name in told.state_dict_metadata if as_bytes else ():
        told.state_dict_metadata[name] = BytesStorageMetadata()
    metadata.write_bytes(pickle.dumps(told))
    (data,) = metadata.parent.glob("*.distcp")
    data.write_bytes(content)
    make_hashes_fit(saved)
    assert ("it has no model" if as_bytes else "Weights only load failed") in load(saved)
    assert not Path("exploded").exists()
    torch.load(data, weights_only=False)
    assert Path("exploded").exists(), "it is a bomb"


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


def test_current_is_replaced_when_all_else_is_on_the_disk_and_before_the_old_goes(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut could lose; kills lose nothing that was written."""
    old = {str(p) for p in saved.glob("version-*")}
    events: list[tuple[str, str]] = []

    def record(module: Any, name: str, file_of: Any) -> None:
        right = getattr(module, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            events.append((name, file_of(*args)))
            return right(*args, **kwargs)

        monkeypatch.setattr(module, name, recorded)

    # torch writes .metadata.tmp and renames it.
    opened = "/proc/self/fd/{}".format
    record(os, "fsync", lambda file: os.readlink(opened(file)).removesuffix(".tmp"))
    record(os, "replace", lambda _, to: str(to))
    record(shutil, "rmtree", lambda path, **_: str(path))
    model = model_of(1)
    pk.checkpoint.save(saved, model, optimizer_of(model))
    (version,) = saved.glob("version-*")
    replaced = events.index(("replace", str(saved / "current")))
    synced = {file for name, file in events[:replaced] if name == "fsync"}
    needed = {*version.iterdir(), version, saved / "current.new"}
    assert {str(file) for file in needed} <= synced
    assert ("fsync", str(saved)) in events[replaced:]
    removed = [i for i, event in enumerate(events) if event[0] == "rmtree"]
    assert {events[i][1] for i in removed} == old and min(removed) > replaced


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
