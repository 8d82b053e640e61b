"""The norm, and when to skip, of parameters that lie on a mesh: replicated, split, and both.

The oracle is one process in float64 with torch.nn.utils.clip_grad_norm_ and torch.optim.AdamW. The
models are float64 too: between the two lie only sums in other orders.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import test_nn_dtensor as tensor_parallel
import torch
from ranks import message_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import parallelkit as pk
from parallelkit.ops import cpu
from parallelkit.testing import run_ranks

STEPS, MAX_NORM = 4, 0.5
OPTIONS: dict[str, Any] = {"lr": 0.01, "eps": 1e-3}
# No number is a sum of more than 2^10 products, each rounded by 2^-53. A step makes at most
# lr / eps of an error in a gradient, and the next gradients see what it made.
BOUND = STEPS * 2.0**-53 * 2**10 * OPTIONS["lr"] / OPTIONS["eps"]

Norms = list[float]


def model_of() -> nn.Sequential:
    torch.manual_seed(3)
    layers = nn.Linear(6, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 5)
    return nn.Sequential(*layers).double()


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Of a rank's batch; they have different sizes."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(1 + 2 * rank, 6, generator=generator, dtype=torch.float64)
    return model(x).square().sum(-1).mean()


def reference(model: nn.Module, loss: Callable[[nn.Module, int], torch.Tensor]) -> Norms:
    """The norms before clipping; the model is stepped."""
    optimizer, norms = torch.optim.AdamW(model.parameters(), **OPTIONS), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    assert sum(norm > MAX_NORM for norm in norms) > 1
    return norms


def stepped(model: nn.Module, group: Any, backward: Callable[[int], object]) -> tuple[Norms, int]:
    """The norms, and the bytes of state. Then a step is skipped for one element on one rank."""
    optimizer = pk.ShardedAdamW(model.parameters(), group=group, max_grad_norm=MAX_NORM, **OPTIONS)
    norms = []
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        backward(step)
        if step == STEPS:
            spoil(model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        assert optimizer.last_grad_norm is not None
        norms.append(float(optimizer.last_grad_norm))
    assert optimizer.skipped_steps == 1 and not math.isfinite(norms.pop())
    return norms, optimizer.state_bytes()


def spoil(parameters: Iterable[nn.Parameter]) -> None:
    """The last element of all, where it is held."""
    *_, last = parameters
    mesh = last.device_mesh
    places = zip(mesh.get_coordinate(), mesh.shape, last.placements, strict=True)
    if all(at == size - 1 or placement == Replicate() for at, size, placement in places):
        last.grad.to_local().view(-1)[-1] = math.nan


def assert_like(wanted: nn.Module, norms: Norms, found: list[Any]) -> None:
    for theirs, state in found:
        for norm, exact in zip(theirs, norms, strict=True):
            assert norm == pytest.approx(exact, rel=BOUND, abs=0)
        assert state.keys() == wanted.state_dict().keys()
        for name, exact in wanted.state_dict().items():
            torch.testing.assert_close(state[name], exact, rtol=0, atol=BOUND)


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def hybrid(group: pk.Group, which: str, way: str) -> Any:
    """fully_shard over a mesh (replicate, shard)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(model_of(), mesh=mesh)
    over: Any = {"all": None, "shard": mesh["shard"]}[which]
    if way != "native":
        process_group = None if over is None else over.get_group()
        over = pk.Group(process_group, algorithm="reference")
    native = cpu if way != "torch" else None
    with mock.patch("parallelkit.distributed_step.cpu", native):
        backward = lambda step: loss_of(model, step, group.rank).backward()  # noqa: E731
        norms, state_bytes = stepped(model, over, backward)
    assert state_bytes == 2 * sum(p.to_local().nbytes for p in model.parameters())
    return norms, whole_state(model)


@pytest.mark.parametrize("way", ["native", "distributed", "torch"])
@pytest.mark.parametrize("which", ["all", "shard"])
def test_replicas_of_a_hybrid_mesh_count_once(which: str, way: str) -> None:
    wanted = model_of()
    norms = reference(wanted, lambda m, step: sum(loss_of(m, step, r) for r in range(4)) / 4)
    assert_like(wanted, norms, run_ranks(hybrid, 4, which, way))


def partly_replicated(group: pk.Group) -> Any:
    """Split linear layers, a replicated norm; gradients as a whole model has them."""
    mesh = init_device_mesh("cpu", (group.size,))
    model, whole = model_of(), model_of()
    for name, p in list(model.named_parameters()):
        child, _, leaf = name.rpartition(".")
        placement = Replicate() if child == "1" else Shard(0)
        new = nn.Parameter(distribute_tensor(p.detach(), mesh, [placement]))
        setattr(model.get_submodule(child), leaf, new)

    def backward(step: int) -> None:
        whole.load_state_dict(whole_state(model))
        whole.zero_grad()
        loss_of(whole, step, 1).backward()
        for p, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            p.grad = distribute_tensor(theirs.grad, mesh, p.placements)

    norms, _ = stepped(model, None, backward)
    return norms, whole_state(model)


def test_replicated_parameters_count_once_beside_split_ones() -> None:
    wanted = model_of()
    norms = reference(wanted, lambda model, step: loss_of(model, step, 1))
    assert_like(wanted, norms, run_ranks(partly_replicated, 2))


def fully_sharded(group: pk.Group, which: str) -> Any:
    """Tensor parallelism along one dimension of a mesh and FSDP2 along the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel.fully_sharded(mesh, 0, False)
    over = {"all": None, "dp": mesh["dp"], "tp": mesh["tp"]}[which]
    mine = mesh["dp"].get_local_rank()

    def backward(step: int) -> None:
        tensor_parallel.loss_of(model, tensor_parallel.batch(step)[mine]).backward()

    norms, _ = stepped(model, over, backward)
    return norms, whole_state(model)


@pytest.mark.parametrize("which", ["all", "dp"])
def test_shards_along_both_dimensions_count_once_whichever_the_group_is(which: str) -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        batch = tensor_parallel.batch(step)
        return sum(tensor_parallel.loss_of(model, batch[r]) / 2 for r in range(2))

    wanted = tensor_parallel.whole_model(0)
    assert_like(wanted, reference(wanted, loss), run_ranks(fully_sharded, 4, which))


def refused(group: pk.Group) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(model_of(), mesh=mesh)
    replicas = mesh["replicate"]
    make = lambda parameters: pk.ShardedAdamW(parameters, group=replicas)  # noqa: E731
    told = [message_of(ValueError, lambda: make(model.named_parameters()))]
    optimizer = make([nn.Parameter(torch.zeros(3))])
    later = {"params": list(model.parameters())}
    told.append(message_of(ValueError, lambda: optimizer.add_param_group(later)))
    assert len(optimizer.param_groups) == 1
    told.append(message_of(ValueError, lambda: fully_sharded(group, "tp")))

    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "a", "b"))
    split, whole = Shard(0), Replicate()
    two = [
        nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, placements, run_check=False))
        for placements in ([split, split, whole], [split, whole, split])
    ]
    told.append(message_of(ValueError, lambda: pk.ShardedAdamW(two, group=mesh["dp"])))
    return told


def test_a_group_without_all_shards_is_refused_on_every_rank() -> None:
    for rank, (named, later, across, several) in enumerate(run_ranks(refused, 4)):
        group = [rank % 2, rank % 2 + 2]
        assert "0.weight is split over dimension 'shard' of a mesh of the ranks" in named
        assert f"[[0, 1], [2, 3]], and the group's ranks {group} do not have all its" in named
        assert "Leave group out, or give the group of all ranks of the mesh" in named
        assert "parameter 0 of group 1 [9, 6] is split over dimension 'shard'" in later
        assert "do not have all its shards" in across  # norms lie along the other dimension alone
        assert "over several dimensions of a mesh" in several


def unlike(group: pk.Group) -> str:
    placement = [Replicate(), Shard(0)][group.rank]
    local = torch.zeros(4 // (1 + group.rank))
    p = DTensor.from_local(local, init_device_mesh("cpu", (2,)), [placement], run_check=False)
    return message_of(pk.CollectiveMismatchError, lambda: pk.ShardedAdamW([nn.Parameter(p)]))


def test_ranks_that_place_a_parameter_differently_are_refused() -> None:
    for told in run_ranks(unlike, 2):
        assert "rank 1 differs from rank 0" in told and "Shard(dim=0)" in told
