"""ShardedAdamW on several ranks against torch.optim.AdamW in one process and float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
from torch import nn

import parallelkit as pk
from parallelkit.testing import run_ranks, virtual_ranks

LR = 0.01


def model_of(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Sizes that no number of ranks divides, a parameter without elements, one that is unused."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 129), nn.LayerNorm(129), nn.Linear(129, 3)
    )
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0)))
    model.register_parameter("unused", nn.Parameter(torch.ones(300)))
    return model.to(dtype)


def batch_of(step: int, rank: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor, int]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    count = 1 + (step + 2 * rank + micro) % 4
    x = torch.randn(count, 7, generator=generator)
    return x, torch.randn(count, 3, generator=generator), count


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> torch.Tensor:
    x, y, _ = batch
    dtype = next(iter(model.parameters())).dtype  # type: ignore[attr-defined]
    return (model(x.to(dtype)) - y.to(dtype)).square().mean()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Decayed matrices and the rest, with different rates, interleaved within every bucket."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 3 * LR},
        {"params": []},
    ]


def expected(seed: int, steps: int, size: int, micros: int = 1, **options: Any) -> nn.Module:
    """One process, float64, torch.optim.AdamW on the gradient over all items."""
    model = model_of(seed, torch.float64)
    optimizer = torch.optim.AdamW(groups_of(model), lr=LR, **options)
    for step in range(steps):
        optimizer.zero_grad()
        batches = [batch_of(step, r, m) for r in range(size) for m in range(micros)]
        total = sum(b[2] for b in batches)
        for batch in batches:
            (loss_of(model, batch) * (batch[2] / total)).backward()
        optimizer.step()
    return model


def assert_close(model: nn.Module | dict[str, torch.Tensor], wanted: nn.Module) -> None:
    found = model if isinstance(model, dict) else model.state_dict()
    for name, tensor in wanted.state_dict().items():
        torch.testing.assert_close(
            found[name].double(), tensor, rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


WAYS = [(fused, algorithm) for fused in (False, True) for algorithm in ("auto", "reference")]


def train_all_ways(group: pk.Group, *args: Any) -> list[Any]:
    found = [train(group, *way, *args) for way in WAYS]
    with mock.patch("parallelkit.distributed_step.cpu", None):  # nor any native code
        return found + [train(group, *way, *args) for way in WAYS if way[1] == "reference"]


def train(
    group: pk.Group, fused: bool, algorithm: str, steps: int, micros: int, options: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], str, Any]:
    """The model after some steps, its hash, and the norm of the last gradient."""
    if algorithm != "auto":
        group = pk.Group(algorithm=algorithm)
    model = pk.DataParallel(model_of(3), group, bucket_mb=0.02)
    optimizer = pk.ShardedAdamW(
        groups_of(model.module),
        lr=LR,
        group=group,
        data_parallel=model if fused else None,
        **options,
    )
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micros):
            batch = batch_of(step, group.rank, micro)
            model.backward(loss_of(model, batch), batch[2], sync=micro == micros - 1)
        if fused:
            assert all(p.grad is None for p in model.parameters())
        optimizer.step()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    return state, ranks.digest(state.values()), optimizer.last_grad_norm


@pytest.mark.parametrize("size", [1, 2, 3])
def test_step_is_torch_adamw_on_the_global_mean(size: int) -> None:
    options: dict[str, Any] = {"amsgrad": size == 2, "maximize": size == 3}
    wanted = expected(3, 4, size, 2, **options)
    for found in zip(*run_ranks(train_all_ways, size, 4, 2, options), strict=True):
        assert ranks.same([digest for _, digest, _ in found])
        assert_close(found[0][0], wanted)
        unused = found[0][0]["unused"]
        assert torch.equal(unused, torch.ones(300)), "nobody used it: its decay must not move it"


def test_clipping_is_by_the_norm_of_the_global_mean() -> None:
    options = {"max_grad_norm": 0.05, "betas": (0.9, 0.9), "eps": 1e-3}
    wanted = model_of(3, torch.float64)
    reference = torch.optim.AdamW(groups_of(wanted), lr=LR, betas=(0.9, 0.9), eps=1e-3)
    for step in range(3):
        reference.zero_grad()
        batches = [batch_of(step, r) for r in range(2)]
        for batch in batches:
            (loss_of(wanted, batch) * batch[2] / sum(b[2] for b in batches)).backward()
        norm = nn.utils.clip_grad_norm_(wanted.parameters(), 0.05)
        reference.step()
    for found in zip(*run_ranks(train_all_ways, 2, 3, 1, options), strict=True):
        assert_close(found[0][0], wanted)
        torch.testing.assert_close(found[0][2], norm.detach(), rtol=1e-3, atol=0)
        assert ranks.same([digest for _, digest, _ in found])


def test_ways_to_accumulate_give_one_result() -> None:
    """The same 24 items as 1, 2, 4 or 8 micro-batches a rank."""
    found = run_ranks(accumulate_all_ways, 2)[0]
    for state in found[1:]:
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, found[0][name], rtol=1e-4, atol=1e-6)


def accumulate_all_ways(group: pk.Group) -> list[dict[str, torch.Tensor]]:
    ways = [(fused, micros) for fused in (False, True) for micros in (1, 2, 4, 8)]
    return [accumulate(group, *way) for way in ways]


def accumulate(group: pk.Group, fused: bool, micros: int) -> dict[str, torch.Tensor]:
    model = pk.DataParallel(model_of(5), group)
    optimizer = pk.ShardedAdamW(
        model.parameters(), lr=LR, data_parallel=model if fused else None, group=group
    )
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(24, 7, generator=generator), torch.randn(24, 3, generator=generator)
        first = [0, 16][group.rank]
        share = slice(first, first + 16 - 8 * group.rank)  # 16 items and 8
        for i, (a, b) in enumerate(
            zip(x[share].chunk(micros), y[share].chunk(micros), strict=True)
        ):
            model.backward(loss_of(model, (a, b, 0)), len(a), sync=i == micros - 1)
        optimizer.step()
        optimizer.zero_grad()
    return {k: v.clone() for k, v in model.state_dict().items()}


def test_rank_without_work_changes_nothing_and_may_hold_nan() -> None:
    found = run_ranks(train_on_rank_0_alone, 2)
    wanted = model_of(3, torch.float64)
    reference = torch.optim.AdamW(groups_of(wanted), lr=LR)
    for step in range(3):
        reference.zero_grad()
        loss_of(wanted, batch_of(step, 0)).backward()
        reference.step()
    assert_close(found[0][0], wanted)
    assert ranks.same([digest for _, digest in found])


def train_on_rank_0_alone(group: pk.Group) -> tuple[dict[str, torch.Tensor], str]:
    model = pk.DataParallel(model_of(3), group)
    optimizer = pk.ShardedAdamW(groups_of(model.module), lr=LR, data_parallel=model)
    for step in range(3):
        if group.rank == 0:
            model.backward(loss_of(model, batch_of(step, 0)), 5)
        else:
            for bucket in model._buckets:
                bucket.flat.fill_(torch.nan)
        optimizer.step()
    optimizer.step()  # nobody has a gradient: nothing moves
    state = {k: v.clone() for k, v in model.state_dict().items()}
    return state, ranks.digest(state.values())


def test_parameter_used_on_one_rank_counts_as_zero_on_the_other() -> None:
    """Weights 2 and 2, gradient 4 on rank 0: the mean is 2."""
    for used, unused in run_ranks(use_on_rank_0, 2):
        assert used == pytest.approx(-2.0, rel=1e-4)
        assert unused == 1.0


def use_on_rank_0(group: pk.Group) -> tuple[float, float]:
    parameters = [nn.Parameter(torch.full((3,), float(i == 2))) for i in range(3)]
    model = pk.DataParallel(nn.ParameterList(parameters), group)
    optimizer = pk.ShardedAdamW(
        model.parameters(),
        lr=1e6,
        betas=(0.0, 0.0),
        eps=1e6,
        weight_decay=1e-7,
        data_parallel=model,
    )
    model.backward((4.0 * parameters[0 if group.rank == 0 else 1]).sum(), 2)
    optimizer.step()
    assert model.total_weight == 4.0
    return parameters[0][0].item(), parameters[2][0].item()


def test_nonfinite_gradient_on_one_rank_is_skipped_on_all() -> None:
    for rank in run_ranks(meet_nan_both_ways, 2):
        for fused, (skipped, said, digests) in zip((False, True), rank, strict=True):
            assert skipped == 3
            assert len(said) == 1
            assert "4.weight" in said[0] if fused else "parameter" in said[0]
            assert "rank 1" in said[0] if fused else "rank 0" in said[0]
            assert len(set(digests)) == 1, "nothing may move, parameters and state alike"


def meet_nan_both_ways(group: pk.Group) -> list[tuple[int, list[str], list[str]]]:
    return [meet_nan(group, fused) for fused in (False, True)]


def meet_nan(group: pk.Group, fused: bool) -> tuple[int, list[str], list[str]]:
    model = pk.DataParallel(model_of(3), group)
    optimizer = pk.ShardedAdamW(
        model.parameters(), lr=LR, data_parallel=model if fused else None, group=group
    )

    def backward(step: int) -> None:
        optimizer.zero_grad()
        batch = batch_of(step, group.rank)
        model.backward(loss_of(model, batch), batch[2])

    backward(0)
    optimizer.step()
    digests = []
    if fused and group.rank == 1:
        nowhere = torch.zeros_like(model.module[4].weight)
        nowhere[1, 7] = torch.inf
        model.module[4].weight.register_hook(lambda gradient: gradient + nowhere)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in range(3):
            backward(step)
            if not fused:
                model.module[4].weight.grad[1, 7] = torch.nan
            optimizer.step()
            entries = [e for s in optimizer.state.values() for e in s.values()]
            digests.append(ranks.digest([*model.state_dict().values(), *entries]))
    return optimizer.skipped_steps, [str(w.message) for w in heard], digests


def test_skipping_can_be_switched_off() -> None:
    parameter = nn.Parameter(torch.ones(5))
    optimizer = pk.ShardedAdamW([parameter], skip_nonfinite=False)
    parameter.grad = torch.tensor([1.0, torch.nan, 1.0, 1.0, 1.0])
    optimizer.step()
    assert parameter.isnan().tolist() == [False, True, False, False, False]
    assert optimizer.last_grad_norm is None


# -- options and groups ----------------------------------------------------------------------------


def test_groups_schedulers_generators_and_late_groups_are_torchs() -> None:
    models = [model_of(1), model_of(1, torch.float64)]
    optimizers: list[Any] = []
    for model, kind in zip(models, (pk.ShardedAdamW, torch.optim.AdamW), strict=True):
        head = list(model[4].parameters())
        rest = [p for p in model.parameters() if not any(p is h for h in head)]
        groups = ({"params": part} for part in (rest[:2], [], rest[2:]))
        optimizers.append((kind(groups, lr=torch.tensor(LR), amsgrad=True), head))
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.9**s) for o, _ in optimizers]
    for step in range(5):
        for model, (optimizer, head), scheduler in zip(models, optimizers, schedulers, strict=True):
            if step == 2:
                optimizer.add_param_group({"params": head, "lr": 0.5 * LR, "weight_decay": 0.3})
                scheduler.lr_lambdas.append(lambda s: 1.0)
                scheduler.base_lrs.append(0.5 * LR)
            optimizer.zero_grad()
            optimizer.step(lambda m=model, s=step: backward_of(m, batch_of(s, 0)))
            scheduler.step()
    assert_close(models[0], models[1])
    rates = [[float(g["lr"]) for g in o.param_groups] for o, _ in optimizers]
    assert rates[0] == pytest.approx(rates[1])


def backward_of(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    return loss


def test_one_cycle_momentum_reaches_the_step() -> None:
    models = [model_of(1), model_of(1, torch.float64)]
    for model, kind in zip(models, (pk.ShardedAdamW, torch.optim.AdamW), strict=True):
        optimizer: Any = kind([{"params": model.parameters()}, {"params": []}], lr=LR)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=6)
        for step in range(5):
            optimizer.zero_grad()
            backward_of(model, batch_of(step, 0))
            optimizer.step()
            scheduler.step()
    assert_close(models[0], models[1])


def test_defaults_are_torchs() -> None:
    parameter = nn.Parameter(torch.ones(2))
    ours, torchs = pk.ShardedAdamW([parameter]), torch.optim.AdamW([parameter])
    assert ours.defaults == torchs.defaults
    with pytest.warns(UserWarning, match="foreach and fused"):
        pk.ShardedAdamW([parameter], fused=True)


def test_strides_of_parameters_and_gradients_do_not_matter() -> None:
    torch.manual_seed(0)
    values, gradient = torch.randn(4, 6, 5, 3), torch.randn(4, 6, 5, 3)
    found = []
    for order in (torch.contiguous_format, torch.channels_last):
        for other in (torch.contiguous_format, torch.channels_last):
            parameter = nn.Parameter(values.clone(memory_format=order))
            optimizer = pk.ShardedAdamW([parameter, nn.Parameter(torch.ones(3, 2).t()[::2])])
            parameter.grad = gradient.clone(memory_format=other)
            optimizer.step()
            found.append((parameter.detach(), optimizer.state_dict()["state"][0]["exp_avg"]))
    for parameter, moment in found[1:]:
        assert torch.equal(parameter, found[0][0])
        assert torch.equal(moment, found[0][1])


# -- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_masters_keep_what_bfloat16_loses(size: int) -> None:
    """Without decay 100 steps of 6e-4; and decay alone for 1000 steps."""
    for grew, decayed, master in virtual_ranks(many_small_steps, size):
        assert grew == torch.tensor(0.94).bfloat16().item() == 0.94140625
        assert decayed == 0.98828125
        assert master == pytest.approx(0.99005, abs=3e-5)


def many_small_steps(group: pk.Group) -> tuple[float, float, float]:
    parameter = nn.Parameter(torch.ones(700, dtype=torch.bfloat16))
    optimizer = pk.ShardedAdamW([parameter], lr=6e-4, weight_decay=0.0, group=group)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    other = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = pk.ShardedAdamW([other], lr=1e-3, weight_decay=0.01, group=group)
    for _ in range(1000):
        other.grad = torch.zeros_like(other)
        optimizer.step()
    master = optimizer.state_dict()["state"][0]["master_param"]
    return parameter[-1].item(), other.item(), master.item()


def test_parameter_written_by_others_wins_over_its_master() -> None:
    model = model_of(2, torch.bfloat16)
    optimizer = pk.ShardedAdamW(model.parameters(), lr=1e-6)
    backward_of(model, batch_of(0, 0))
    optimizer.step()
    loaded = model_of(4, torch.bfloat16).state_dict()
    model.load_state_dict(loaded)
    optimizer.zero_grad()
    backward_of(model, batch_of(1, 0))
    optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, loaded[name], rtol=1e-2, atol=1e-4)


def test_state_bytes_are_8_or_12_an_owned_element() -> None:
    numel = sum(p.numel() for p in model_of(0).parameters())
    for dtype, each in ((torch.float32, 8), (torch.bfloat16, 12), (torch.float64, 16)):
        for size in (1, 2, 3):
            held = virtual_ranks(lambda g, d=dtype: held_bytes(g, d), size)
            assert sum(held) == each * numel
            assert max(held) <= each * (numel / size + 3 * 256)


def held_bytes(group: pk.Group, dtype: torch.dtype) -> int:
    optimizer = pk.ShardedAdamW(model_of(0, dtype).parameters(), group=group)
    return optimizer.state_bytes()


def test_hooks_and_deep_copies_of_the_model_see_an_ordinary_optimizer() -> None:
    model = model_of(0)
    copied = copy.deepcopy(model)
    optimizer = pk.ShardedAdamW(model.named_parameters())
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    backward_of(model, batch_of(0, 0))
    optimizer.step()
    assert seen == ["before", "after"]
    assert not torch.equal(copied[0].weight, model[0].weight)
    assert optimizer.param_groups[0]["param_names"][1] == "unused"


def train_late_parameters(group: pk.Group, frozen: bool, late: int) -> float:
    """The largest error after 5 steps; the parameters of one layer come before step `late`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    reference = copy.deepcopy(model).double()
    wrapped = pk.DataParallel(model, group)
    for net in (model, reference):
        net[0].requires_grad_(not frozen)
    mine = pk.ShardedAdamW((model if frozen else model[0]).parameters(), LR, data_parallel=wrapped)
    wanted = torch.optim.AdamW((reference if frozen else reference[0]).parameters(), LR)
    for step in range(5):
        if step == late:
            for net, optimizer in ((model, mine), (reference, wanted)):
                net[0].requires_grad_(True)
                if not frozen:
                    optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 2 * LR})
        x, y = torch.randn(group.size, 4, 5), torch.randn(group.size, 4, 3)
        wrapped.backward((wrapped(x[group.rank]) - y[group.rank]).square().mean(), 4)
        mine.step()
        reference.zero_grad()
        (reference(x.double()) - y.double()).square().mean().backward()
        wanted.step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((a.detach().double() - b.detach()).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("frozen", [False, True], ids=["added", "thawed"])
@pytest.mark.parametrize("late", [0, 2])
def test_parameters_that_come_later_train_in_one_pass_too(frozen: bool, late: int) -> None:
    for size in (1, 3):
        assert max(run_ranks(train_late_parameters, size, frozen, late)) < 1e-6
