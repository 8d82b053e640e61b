"""ShardedAdamW refuses what cannot work, on every rank alike, and changes nothing."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import ranks
import torch
from torch import nn

import parallelkit as pk
from parallelkit.testing import run_ranks, virtual_ranks


def test_bad_options_are_named() -> None:
    parameter = [nn.Parameter(torch.ones(2))]
    for options, text in (
        ({"lr": -1.0}, "learning rate"),
        ({"betas": (1.0, 0.9)}, "beta"),
        ({"state_dtype": torch.float16}, "state_dtype"),
        ({"master_weights": "yes"}, "master_weights"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
    ):
        with pytest.raises(ValueError, match=text):
            pk.ShardedAdamW(parameter, **options)
    with pytest.raises(TypeError, match="complex64"):
        pk.ShardedAdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    with pytest.raises(TypeError, match="data_parallel"):
        pk.ShardedAdamW(parameter, data_parallel=nn.Linear(1, 1))


def test_differing_ranks_are_refused_alike() -> None:
    for message in run_ranks(disagree, 2):
        assert "rank 1" in message[0] and "differs from rank 0" in message[0]
        assert "lr=1.1 in group 0 instead of lr=0.1" in message[1]
        assert "has a gradient on one of" in message[2]


def disagree(group: pk.Group) -> list[str]:
    heard = []
    kind = pk.CollectiveMismatchError
    parameter = nn.Parameter(torch.ones(3 + group.rank))
    heard.append(ranks.message_of(kind, lambda: pk.ShardedAdamW([parameter])))
    parameter = nn.Parameter(torch.ones(3))
    optimizer = pk.ShardedAdamW([parameter], lr=0.1 + group.rank)
    parameter.grad = torch.ones(3)
    heard.append(ranks.message_of(kind, optimizer.step))
    optimizer.param_groups[0]["lr"] = 0.1
    parameter.grad = torch.ones(3) if group.rank else None
    heard.append(ranks.message_of(kind, optimizer.step))
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert float(parameter.detach()[0]) == pytest.approx(0.899)
    return heard


def test_every_option_that_differs_is_refused_at_the_step() -> None:
    for heard in virtual_ranks(differ_in_each_option, 2):
        assert all("rank 1" in message for message in heard)


def differ_in_each_option(group: pk.Group) -> list[str]:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = pk.ShardedAdamW([parameter], group=group)
    options = optimizer.param_groups[0]
    parameter.grad = torch.ones(3)
    heard = []
    for name, other in (
        ("lr", 0.5),
        ("betas", (0.8, 0.999)),
        ("betas", (0.9, 0.99)),
        ("eps", 1e-3),
        ("weight_decay", 0.5),
        ("maximize", True),
    ):
        right = options[name]
        options[name] = other if group.rank == 1 else right
        heard.append(ranks.message_of(pk.CollectiveMismatchError, optimizer.step))
        options[name] = right
    assert torch.equal(parameter.detach(), torch.ones(3))
    return heard


def test_ranks_that_construct_different_things_hear_what_each_constructs() -> None:
    for message in virtual_ranks(construct_by_rank, 2):
        assert "ShardedAdamW on rank 0; DataParallel on rank 1" in message


def construct_by_rank(group: pk.Group) -> str:
    module = nn.Linear(2, 1)

    def construct() -> object:
        if group.rank == 0:
            return pk.ShardedAdamW(module.parameters(), group=group)
        return pk.DataParallel(module, group)

    return ranks.message_of(pk.CollectiveMismatchError, construct)


def test_a_fault_of_one_rank_in_the_constructor_is_raised_on_all() -> None:
    for messages in run_ranks(construct_with_a_fault, 2):
        for (rank, text), message in zip(FAULTS, messages, strict=True):
            assert text in message
            assert f"rank {rank}" in message


FAULTS = [
    (1, "learning rate: -1"),
    (0, "state_dtype must be"),
    (1, "empty parameter list"),
    (0, "max_grad_norm must be above 0"),
    (1, "must be float32, float64, bfloat16 or float16, got torch.complex64"),
    (0, "is not a parameter of data_parallel"),
    (1, "max_grad_norm=2.0 instead of max_grad_norm=None"),
    (1, "some parameters appear in more than one parameter group"),
    (1, "every rank needs the whole of it"),
]


def construct_with_a_fault(group: pk.Group) -> list[str]:
    module = nn.Linear(3, 2)
    model = pk.DataParallel(module, group)
    faults: list[dict[str, Any]] = [
        {"lr": -1.0},
        {"state_dtype": torch.int32},
        {"params": []},
        {"max_grad_norm": -1.0},
        {"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]},
        {"params": [nn.Parameter(torch.zeros(2))], "data_parallel": model},
        {"max_grad_norm": 2.0},
    ]
    heard = []
    for (rank, _), fault in zip(FAULTS, faults, strict=False):
        right = {"params": list(module.parameters()), "data_parallel": model}
        options = right | fault if group.rank == rank else right
        if "params" in fault and "data_parallel" not in fault:
            options = {k: v for k, v in options.items() if k != "data_parallel"}
        heard.append(ranks.message_of(Exception, lambda o=options: pk.ShardedAdamW(**o)))
    optimizer = pk.ShardedAdamW(module.parameters(), data_parallel=None)
    new = module.weight if group.rank == 1 else nn.Parameter(torch.zeros(5))
    heard.append(ranks.message_of(ValueError, lambda: optimizer.add_param_group({"params": [new]})))
    assert len(optimizer.param_groups) == 1
    state = optimizer.state_dict(rank0_only=True)
    heard.append(ranks.message_of(ValueError, lambda: optimizer.load_state_dict(state)))
    pk.ShardedAdamW(module.parameters(), data_parallel=model)  # nobody has taken the gradients
    return heard


def test_parameters_that_were_converted_are_refused_on_all_ranks() -> None:
    for size in (1, 2):
        for message in virtual_ranks(convert, size):
            assert "was torch.float32 and is torch.float64 on cpu" in message


def convert(group: pk.Group) -> str:
    parameters = [nn.Parameter(torch.ones(300)) for _ in range(2)]
    optimizer = pk.ShardedAdamW(parameters, group=group)
    if group.rank == 0:
        parameters[1].data = parameters[1].detach().double()
    return ranks.message_of(RuntimeError, optimizer.step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_parameters_that_were_moved_come_back_with_the_values_they_have(
    size: int, dtype: torch.dtype
) -> None:
    wanted = virtual_ranks(partial(move_away, dtype=dtype, moves=False), size)
    found = virtual_ranks(partial(move_away, dtype=dtype, moves=True), size)
    assert ranks.same([*found, *wanted])


def move_away(group: pk.Group, dtype: torch.dtype, moves: bool) -> list[float]:
    """What two steps give; between them, values change and memory does on one rank or on all."""
    parameters = [nn.Parameter(torch.linspace(1.0, 2.0, 300).to(dtype)) for _ in range(3)]
    optimizer = pk.ShardedAdamW(parameters, lr=0.1, group=group)
    for step in range(2):
        for p in parameters:
            p.grad = torch.linspace(-1.0, 1.0, 300).to(dtype)
        with torch.no_grad():
            if moves and group.rank == group.size - 1:
                parameters[step].data = parameters[step].clone()
            if moves:  # which no version counter tells
                parameters[1].data = parameters[1].detach() * 1.5
            else:
                parameters[1].mul_(1.5)
        optimizer.step()
    return [value for p in parameters for value in p.tolist()]


def test_an_optimizer_cannot_be_copied_or_pickled() -> None:
    optimizer = pk.ShardedAdamW([nn.Parameter(torch.ones(3))])
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match=r"copy or save state_dict\(\)"):
            copying(optimizer)


def test_gradients_go_to_one_optimizer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapped = pk.DataParallel(model)
    pk.ShardedAdamW(model[0].parameters(), data_parallel=wrapped)
    with pytest.raises(RuntimeError, match="an optimizer has these gradients already"):
        pk.ShardedAdamW(model[1].parameters(), data_parallel=wrapped)
