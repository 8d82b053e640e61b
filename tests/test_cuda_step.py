"""The sharded optimizer on GPUs: what the host tells the kernels, on kernels that a fake plays."""

from __future__ import annotations

import copy
import math
import warnings
from types import SimpleNamespace

import fake_gpus
import pytest
import torch
from ranks import NATIVE, digest, same
from torch import nn
from training import Leaf, items, mean_square, mlp

import parallelkit as pk

pytestmark = pytest.mark.skipif(not NATIVE, reason="no native extension")

STEPS = 4
COUNTS = [2, 3, 1, 4, 2, 2, 5, 1]  # items of the micro-batches, dealt out to the ranks


@pytest.fixture
def runtime(monkeypatch):
    return fake_gpus.install(monkeypatch, fake_gpus.Runtime())


def whole_batch(module: nn.Module, step: int) -> None:
    """The gradient of the mean over all micro-batches of a step."""
    batches = items(COUNTS, seed=step)
    total = sum(weight for _, weight in batches)
    for x, weight in batches:
        (mean_square(module, x) * (weight / total)).backward()


def reference(module: nn.Module, norm: float | None = None, **options) -> nn.Module:
    """The same steps by torch in float64."""
    module = copy.deepcopy(module).double()
    optimizer = torch.optim.AdamW(module.parameters(), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        whole_batch(module, step)
        if norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), norm)
        optimizer.step()
    return module


def train(group, model, optimizer, steps=range(STEPS)):
    for step in steps:
        model.zero_grad()
        for x, weight in items(COUNTS, seed=step)[group.rank :: group.size]:
            model.backward(mean_square(model, x), weight, sync=False)
        if not optimizer.averages:
            model.backward(None, weight=0)
        optimizer.step()


@torch.no_grad()
def worst(module: nn.Module, wanted: nn.Module) -> float:
    pairs = zip(module.parameters(), wanted.parameters(), strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("fused", [False, True], ids=["averaged", "one-pass"])
@pytest.mark.parametrize(
    ("norm", "options"),
    [
        (None, {"lr": 0.02, "weight_decay": 0.1}),
        (0.05, {"lr": 0.02, "amsgrad": True, "betas": (0.7, 0.9), "maximize": True}),
    ],
    ids=["plain", "clipped"],
)
def test_steps_are_those_of_torch(runtime, size, fused, norm, options):
    module = mlp(inputs=200)  # wide enough that several ranks own a part of one parameter

    wanted = reference(WideMlp(module), norm, **options)

    def rank(group):
        model = pk.DataParallel(WideMlp(copy.deepcopy(module)), group)
        optimizer = pk.ShardedAdamW(
            model.parameters(),
            group=group,
            data_parallel=model if fused else None,
            max_grad_norm=norm,
            **options,
        )
        train(group, model, optimizer)
        kinds = {type(optimizer._step).__name__}
        state = optimizer.state_dict()["state"]
        assert all(s["step"].device.type == "cpu" and s["step"] == STEPS for s in state.values())
        assert optimizer.skipped_steps == 0
        return model.module, kinds, digest(model.parameters())

    results = fake_gpus.peers(runtime, rank, size)
    assert same([r[2] for r in results]), "replicas are equal to the bit"
    assert results[0][1] == {"DeviceStep"}
    assert worst(results[0][0], wanted) < 2e-6


class WideMlp(nn.Module):
    """An MLP of 200 inputs fed with 5."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.repeat(1, 40))


def test_masters_follow_bfloat16_parameters(runtime):
    """Case 20: 100 steps of lr 6e-4 on a gradient of 1 move 1.0 to 0.94."""

    def rank(group):
        module = Leaf(5, dtype=torch.bfloat16)
        nn.init.ones_(module.p)
        model = pk.DataParallel(module, group)
        optimizer = pk.ShardedAdamW(
            model.parameters(), 6e-4, weight_decay=0.0, group=group, data_parallel=model
        )
        for _ in range(100):
            model.backward(model(1.0))
            optimizer.step()
        return module.p.tolist()

    assert fake_gpus.peers(runtime, rank, 2) == [[0.94140625] * 5] * 2


def test_a_step_that_is_not_finite_is_skipped_and_told_when_the_host_knows(runtime):
    def rank(group):
        model = pk.DataParallel(Leaf(3), group)
        optimizer = pk.ShardedAdamW(
            model.parameters(), group=group, data_parallel=model, max_grad_norm=math.inf
        )
        heard = []
        for gradient in (1.0, float("nan"), 1.0, float("inf"), 1.0):
            model.backward(model(gradient if group.rank == 1 else 1.0))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                optimizer.step()
            heard.append([str(w.message) for w in said])
        steps = optimizer.state_dict()["state"][0]["step"].item()
        before = optimizer.skipped_steps
        optimizer.load_state_dict(optimizer.state_dict())
        return heard, steps, before, optimizer.skipped_steps, optimizer.last_grad_norm.item()

    results = fake_gpus.peers(runtime, rank, 2)
    for _, steps, *counts, norm in results:
        assert (steps, counts) == (3, [2, 2])
        assert norm == pytest.approx(3**0.5)
    said = [text for heard, *_ in results for texts in heard for text in texts]
    assert said and all("a gradient was not finite" in text for text in said)


def test_a_grad_scaler_halves_its_scale_after_a_skipped_step(runtime):
    def rank(group):
        model = pk.DataParallel(Leaf(3), group)
        optimizer = pk.ShardedAdamW(model.parameters(), group=group, data_parallel=model)
        scaler = pk.GradScaler("cpu", init_scale=8.0, group=group)
        for gradient in (1.0, float("inf")):
            loss = model(gradient if group.rank == 1 else 1.0)
            model.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), optimizer.skipped_steps, optimizer.last_grad_norm.item()

    for scale, skipped, _ in fake_gpus.peers(runtime, rank, 2):
        assert (scale, skipped) == (4.0, 1)


def test_state_goes_over_to_torch_and_comes_back(runtime):
    module = mlp()
    wanted = reference(module, lr=0.02)

    def rank(group):
        model = pk.DataParallel(copy.deepcopy(module), group)
        first = pk.ShardedAdamW(model.parameters(), lr=0.02, group=group, data_parallel=model)
        train(group, model, first, range(2))
        kept = first.state_dict()
        torch.optim.AdamW(copy.deepcopy(model.module).parameters()).load_state_dict(kept)
        again = pk.DataParallel(copy.deepcopy(model.module), group)
        second = pk.ShardedAdamW(again.parameters(), group=group, data_parallel=again)
        second.load_state_dict(kept)
        train(group, again, second, range(2, STEPS))
        train(group, model, first, range(2, STEPS))
        assert kept["state"][0]["step"] == 2, "a copy of what it was"
        return again.module

    for found in fake_gpus.peers(runtime, rank, 2):
        assert worst(found, wanted) < 2e-6


def test_tables_travel_only_when_something_changed(runtime):
    def rank(group):
        model = pk.DataParallel(Leaf(3), group)
        optimizer = pk.ShardedAdamW(model.parameters(), group=group, data_parallel=model)
        sets = []
        for lr in (1e-3, 1e-3, 2e-3):
            optimizer.param_groups[0]["lr"] = lr
            model.backward(model(1.0))
            optimizer.step()
            sets.append(optimizer._step._native.sets)
        return sets

    assert fake_gpus.peers(runtime, rank, 2) == [[1, 1, 2]] * 2


def test_a_step_waits_for_no_gpu(runtime, monkeypatch):
    def rank(group):
        model = pk.DataParallel(Leaf(3), group)
        optimizer = pk.ShardedAdamW(
            model.parameters(), group=group, data_parallel=model, max_grad_norm=1.0
        )
        model.backward(model(1.0))
        optimizer.step()  # makes the step, and reads how many were taken
        counts = optimizer._step._counts
        asked = []
        real = {name: getattr(torch.Tensor, name) for name in ("item", "tolist", "__float__")}

        def watched(name):
            def method(self, *args):
                if self.untyped_storage().data_ptr() == counts.untyped_storage().data_ptr():
                    asked.append(name)
                return real[name](self, *args)

            return method

        for name in real:
            monkeypatch.setattr(torch.Tensor, name, watched(name))
        model.backward(model(1.0))
        optimizer.step()
        return asked, bool(counts.eq(2).all())

    assert fake_gpus.peers(runtime, rank, 1) == [([], True)]


def test_what_another_rank_counts_is_left_out_of_the_norm(runtime):
    def rank(group):
        counted, copied = (nn.Parameter(torch.zeros(3)) for _ in range(2))
        copied.tp_split = SimpleNamespace(group=group)  # a part that a neighbour has too
        parameters = [counted, copied]
        optimizer = pk.ShardedAdamW(parameters, group=group, max_grad_norm=math.inf)
        counted.grad, copied.grad = torch.full((3,), 2.0), torch.full((3,), 5.0)
        optimizer.step()
        return optimizer.last_grad_norm.item(), bool((copied < 0).all())

    assert fake_gpus.peers(runtime, rank, 2) == [(pytest.approx(12**0.5), True)] * 2


@pytest.mark.parametrize("asked", ["1", "0", None])
def test_multicast_is_used_by_request_only(runtime, monkeypatch, asked):
    if asked is None:
        monkeypatch.delenv("PARALLELKIT_MULTICAST", raising=False)
    else:
        monkeypatch.setenv("PARALLELKIT_MULTICAST", asked)

    def rank(group):
        model = pk.DataParallel(Leaf(3), group)
        optimizer = pk.ShardedAdamW(model.parameters(), group=group, data_parallel=model)
        model.backward(model(1.0))
        optimizer.step()

    fake_gpus.peers(runtime, rank, 1)
    assert runtime.multicast == (asked == "1")
