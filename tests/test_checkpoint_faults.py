"""A checkpoint that cannot be written: one line on every rank says where, why and on which."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import ranks
import torch
from torch import nn

import parallelkit as pk
from parallelkit.checkpoint import CheckpointError
from parallelkit.testing import run_ranks


def models_of(group: pk.Group) -> nn.ModuleDict:
    """A large layer on the last rank alone, and little on the others."""
    width = 300 if group.rank == group.size - 1 else 2
    return nn.ModuleDict({str(group.rank): nn.Linear(width, width)})


def fill_the_disk(group: pk.Group, path: str) -> tuple[str, bool]:
    """What a save says where files of the last rank become too large; whether the old one stays."""
    model = models_of(group)
    pk.checkpoint.save(path, model, extra="whole")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, limits[1]))
        text = ranks.message_of(CheckpointError, lambda: pk.checkpoint.save(path, model))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return text, pk.checkpoint.load(path, model) == "whole"


def test_a_file_that_cannot_be_written_is_one_line_with_the_folder_and_the_rank(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "c")
    for size in (1, 2):
        told = run_ranks(fill_the_disk, size, path)
        assert ranks.same(told)
        text, whole = told[0]
        assert whole
        assert text.startswith(f"{path}: ") and text.endswith(f" [rank {size - 1} of {size}]")
        assert "Error: " in text and len(text) < 400 and "\n" not in text, text
        assert len(list(Path(path).iterdir())) == 2, "what was begun is cleared away"


def onto_a_file(group: pk.Group, path: str) -> list[str]:
    model = nn.Linear(2, 2)
    return [
        ranks.message_of(CheckpointError, lambda p=p: pk.checkpoint.save(p, model))
        for p in (path, f"{path}/below")
    ]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    told = run_ranks(onto_a_file, 2, str(file))
    assert ranks.same(told)
    assert f"{file}: the folder cannot be made: FileExistsError" in told[0][0]
    assert f"{file}/below: the folder cannot be made: NotADirectoryError" in told[0][1]
    assert all("rank 0 of 2" in text for text in told[0])


def test_a_failure_when_all_is_written_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    model = nn.Linear(2, 2)
    pk.checkpoint.save(tmp_path / "c", model)
    before = torch.clone(model.weight.detach())
    monkeypatch.setattr("parallelkit.checkpoint.publish", fail)
    with pytest.raises(CheckpointError) as caught:
        pk.checkpoint.save(tmp_path / "c", model)
    assert str(caught.value) == (
        f"{tmp_path / 'c'}: OSError: [Errno 28] No space left on device [rank 0 of 1]"
    )
    monkeypatch.undo()
    pk.checkpoint.load(tmp_path / "c", model)
    assert torch.equal(model.weight, before)
