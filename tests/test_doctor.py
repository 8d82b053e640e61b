"""`parallelkit doctor`: what it finds, and when it ends with status 1."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from parallelkit import doctor
from parallelkit.cli import main


def test_a_healthy_machine_is_told_what_its_ranks_will_use(capsys):
    status = main(["doctor"])
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert "BROKEN" not in shown
    assert "the mean of 1 and 5 with weights 1 and 3 is 4" in shown
    for section in ("Built", "Versions", "Shared memory", "GPUs", "What follows"):
        assert f"{section}\n" in shown


def no_conclusions(monkeypatch):
    """Leave out the part that starts ranks: it takes seconds."""
    monkeypatch.setattr(doctor, "conclusions", lambda: iter(()))


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
def test_shared_memory_that_cannot_be_had_is_broken(monkeypatch, capsys):
    def refuse(name: str) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    no_conclusions(monkeypatch)
    monkeypatch.setattr(os, "memfd_create", refuse)
    assert main(["doctor"]) == 1
    assert "BROKEN: cannot be used: Operation not permitted" in capsys.readouterr().out


def test_an_extension_that_is_there_but_does_not_load_is_broken(monkeypatch, capsys):
    no_conclusions(monkeypatch)
    monkeypatch.setattr("parallelkit.ops.cpu", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert main(["doctor"]) == 1
    assert "BROKEN: does not load" in capsys.readouterr().out


def test_an_extension_that_was_never_built_is_no_fault(monkeypatch, capsys):
    no_conclusions(monkeypatch)
    monkeypatch.setattr("parallelkit.ops.cpu", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["doctor"]) == 0
    assert "not built: install a C++20 compiler" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [3.0, RuntimeError("rank 1 died")])
def test_ranks_that_do_not_work_are_broken(monkeypatch, wrong):
    def run_ranks(fn: object, size: int) -> list[tuple[str, float]]:
        if isinstance(wrong, Exception):
            raise wrong
        return [("shared-memory", wrong)] * size

    monkeypatch.setattr("parallelkit.testing.run_ranks", run_ranks)
    first = next(doctor.conclusions())
    assert first.name == "2 CPU ranks" and first.broken


def test_gpus_are_listed_with_the_peers_they_reach(monkeypatch):
    import torch

    class Properties:
        name, major, minor, total_memory = "Tesla", 9, 0, 80 * 2**30

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} == {0, 2})
    shown = [f"{finding.name} {finding.text}" for finding in doctor.gpus()]
    assert shown == [
        "cuda:0 Tesla, sm_90, 80 GiB; reaches 2 directly",
        "cuda:1 Tesla, sm_90, 80 GiB; reaches no other GPU directly",
        "cuda:2 Tesla, sm_90, 80 GiB; reaches 0 directly",
    ]
