"""A checkpoint goes by name: nothing to the wrong parameter, nothing left out in silence."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import parallelkit as pk
from parallelkit.checkpoint import CheckpointError
from parallelkit.testing import run_ranks

NAMES = "abc"


def layers(order: Iterable[str] = NAMES) -> nn.Sequential:
    """Of equal shapes, so that only names tell them apart."""
    return nn.Sequential(OrderedDict((name, nn.Linear(8, 8)) for name in order))


def step(model: nn.Module, optimizer: pk.ShardedAdamW) -> None:
    """One step whose gradient of parameter i, in the order of names, is i + 1 everywhere."""
    for i, (_, p) in enumerate(sorted(model.named_parameters())):
        p.grad = torch.full_like(p, i + 1.0)
    optimizer.step()


def moments(model: nn.Module, optimizer: pk.ShardedAdamW) -> dict[str, float]:
    """The first element of this rank's part of each parameter's first moment, by name."""
    state = optimizer.state_dict()["state"]
    index = {p: i for i, p in enumerate(optimizer.parameters())}
    found = {}
    for name, p in model.named_parameters():
        entry = state[index[p]]["exp_avg"]
        entry = entry.to_local() if hasattr(entry, "to_local") else entry
        assert (entry == entry.flatten()[0]).all()
        found[name] = round(float(entry.flatten()[0]), 3)
    return found


# -- the order -------------------------------------------------------------------------------------


def plain(order: str) -> tuple[nn.Module, pk.ShardedAdamW]:
    model = layers(order)
    return model, pk.ShardedAdamW(model.parameters())


def reversed_in_the_group(order: str) -> tuple[nn.Module, pk.ShardedAdamW]:
    model = layers()
    return model, pk.ShardedAdamW(list(model.named_parameters())[::-1])


def wrapped(order: str) -> tuple[nn.Module, pk.ShardedAdamW]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = layers(order)
    model.b = checkpoint_wrapper(model.b)
    outer = pk.DataParallel(model)
    return outer, pk.ShardedAdamW(outer.parameters(), data_parallel=outer)


def fully_sharded(order: str) -> tuple[nn.Module, pk.ShardedAdamW]:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(layers(order))
    return model, pk.ShardedAdamW(model.parameters())


def split(order: str) -> tuple[nn.Module, pk.ShardedAdamW]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plan = {"a": "colwise", "b": "rowwise", "c": "packed_colwise:2"}
    model = pk.tensor_parallel(layers(order), mesh["tp"], plan)
    return model, pk.ShardedAdamW(model.parameters(), group=mesh["dp"])


def through_every_kind(group: pk.Group, path: str) -> dict[str, dict[str, float]]:
    """Each kind writes the names in one order, and another kind reads them in another."""
    kinds: list[Callable[[str], tuple[nn.Module, pk.ShardedAdamW]]] = [
        plain, reversed_in_the_group, wrapped, fully_sharded, split, plain
    ]  # fmt: skip
    found = {}
    model, optimizer = plain(NAMES)
    step(model, optimizer)
    for kind, order in zip(kinds, ("cba", "bca", "cab", "bac", "cba", "abc"), strict=True):
        pk.checkpoint.save(path, model, optimizer)
        model, optimizer = kind(order)
        pk.checkpoint.load(path, model, optimizer)
        found[f"{kind.__name__} {order}"] = {
            name.replace("_checkpoint_wrapped_module.", ""): moment
            for name, moment in moments(model, optimizer).items()
        }
    return found


def test_moments_go_to_the_parameter_of_their_name_whatever_the_order(tmp_path: Path) -> None:
    names = sorted(name for name, _ in layers().named_parameters())
    wanted = {name: round(0.1 * (i + 1), 3) for i, name in enumerate(names)}
    for found in run_ranks(through_every_kind, 2, str(tmp_path)):
        for kind, told in found.items():
            assert told == wanted, kind


class Tied(nn.Module):
    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        shared = nn.Parameter(torch.ones(3))
        for name in names:
            setattr(self, name, nn.Parameter(torch.ones(3)) if name == "own" else shared)


def test_a_tied_parameter_has_one_name_whatever_the_order(tmp_path: Path) -> None:
    found = []
    for names in (("first", "own", "last"), ("own", "last", "first")):
        model = Tied(names)
        optimizer = pk.ShardedAdamW(model.parameters())
        if found:
            pk.checkpoint.load(tmp_path, model, optimizer)
        else:
            model.own.grad, model.first.grad = torch.ones(3), torch.full((3,), 2.0)
            optimizer.step()
            pk.checkpoint.save(tmp_path, model, optimizer)
        state = {p: float(s["exp_avg"][0]) for p, s in optimizer.state.items()}
        found.append((state[model.own], state[model.first]))
    assert found[0] == found[1] == pytest.approx((0.1, 0.2))


# -- what is not the same --------------------------------------------------------------------------


def refused(path: Path, model: nn.Module, optimizer: pk.ShardedAdamW | None) -> str:
    """The error's text; fails where anything was changed."""

    def everything() -> str:
        entries = [e for s in optimizer.state.values() for e in s.values()] if optimizer else []
        tensors = [e for e in entries if isinstance(e, torch.Tensor)]
        return ranks.digest([*model.state_dict().values(), *tensors])

    before = everything()
    text = ranks.message_of(CheckpointError, lambda: pk.checkpoint.load(path, model, optimizer))
    assert everything() == before
    return text


def test_a_parameter_in_another_group_or_in_none_is_refused_by_name(tmp_path: Path) -> None:
    def optimizer_of(model: nn.Module, *groups: str) -> pk.ShardedAdamW:
        return pk.ShardedAdamW(
            [
                {"params": [p for n in names for p in getattr(model, n).parameters()]}
                for names in groups
            ]
        )

    model = layers()
    pk.checkpoint.save(tmp_path, model, optimizer_of(model, "a", "b"))
    for groups, complaint in (
        (("ab",), "must have b.weight in parameter group 1, got it in parameter group 0"),
        (("b", "a"), "must have b.weight in parameter group 1, got it in parameter group 0"),
        (("a", "bc"), "must have c.weight in no parameter group, got it in parameter group 1"),
        (("a", ""), "must have b.weight in parameter group 1, got it in no parameter group"),
        (("a", "b", ""), "must have 2 parameter groups, got 3"),
    ):
        assert complaint in refused(tmp_path, model, optimizer_of(model, *groups))
    pk.checkpoint.load(tmp_path, model, optimizer_of(model, "a", "b"))


def strange(group: pk.Group, path: str) -> list[str]:
    """What save and load say of a parameter that the model does not have, named and not."""
    model, other = layers(), nn.ParameterDict({"scale": torch.ones(3)})
    pk.checkpoint.save(path, model, pk.ShardedAdamW(model.parameters()))
    told = []
    for parameters in (
        [*model.named_parameters(), *other.named_parameters()],
        [*model.parameters(), *other.parameters()],
    ):
        optimizer = pk.ShardedAdamW(parameters)
        for call in (pk.checkpoint.save, pk.checkpoint.load):
            told.append(ranks.message_of(ValueError, lambda c=call, o=optimizer: c(path, model, o)))
    return told


def test_a_parameter_that_is_not_in_the_model_is_refused_by_name(tmp_path: Path) -> None:
    told = run_ranks(strange, 2, str(tmp_path))
    assert ranks.same(told)
    for text, name in zip(
        told[0], ("scale", "scale", *["parameter 6 of group 0"] * 2), strict=True
    ):
        assert f"the optimizer's {name}" in text


def into_meta(group: pk.Group, path: str) -> list[str]:
    """Rank 1's model, and then a sharded one, has no values yet."""
    from torch.distributed.fsdp import fully_shard

    pk.checkpoint.save(path, layers())
    with torch.device("meta"):
        empty, sharded = layers(), fully_shard(layers())
    told = []
    for model in (empty if group.rank else layers(), sharded):
        for call in (pk.checkpoint.load, pk.checkpoint.save):
            told.append(ranks.message_of(ValueError, lambda c=call, m=model: c(path, m)))
    pk.checkpoint.load(path, sharded.to_empty(device="cpu"))
    return told


def test_a_model_without_values_is_refused_on_every_rank(tmp_path: Path) -> None:
    told = run_ranks(into_meta, 2, str(tmp_path))
    assert ranks.same(told)
    for text in told[0]:
        assert "model's a.weight is on the meta device" in text
        assert "model.to_empty(device=...) first" in text


def test_a_model_that_lacks_what_was_saved_is_refused(tmp_path: Path) -> None:
    model, optimizer = plain(NAMES)
    pk.checkpoint.save(tmp_path, model, optimizer)
    for smaller, name in ((layers("ac"), "b.bias"), (nn.Module(), "a.bias")):
        assert f"it has no model.{name}" in refused(tmp_path, smaller, None)
    assert "it has no model.b.bias" in refused(tmp_path, *plain("ac"))
    pk.checkpoint.load(tmp_path, model)  # without the optimizer's part


def in_parts(group: pk.Group, path: str) -> str:
    """Each rank has a layer of its own; then rank 1 has rank 0's."""
    own: dict[str, Any] = {"common": nn.Linear(2, 2), str(group.rank): nn.Linear(2, 2)}
    pk.checkpoint.save(path, nn.ModuleDict(own))
    pk.checkpoint.load(path, nn.ModuleDict(own))
    other = nn.ModuleDict({"common": nn.Linear(2, 2), "0": nn.Linear(2, 2)})
    before = ranks.digest(other.state_dict().values())
    text = ranks.message_of(CheckpointError, lambda: pk.checkpoint.load(path, other))
    assert ranks.digest(other.state_dict().values()) == before
    return text


def test_ranks_with_different_parts_have_all_of_a_model_together(tmp_path: Path) -> None:
    told = run_ranks(in_parts, 2, str(tmp_path))
    assert ranks.same(told)
    assert "it has no model.1.bias" in told[0]


def thaw_and_resume(group: pk.Group, path: str) -> list[str]:
    """Save what began frozen and trains since; load into one that thaws, and one that does not."""

    def half_frozen() -> tuple[nn.Module, pk.ShardedAdamW]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 70), nn.Linear(70, 2))
        model[0].requires_grad_(False)
        return model, pk.ShardedAdamW(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: pk.ShardedAdamW, seed: int) -> None:
        optimizer.zero_grad()
        model(ranks.random(seed, 0, (6, 5), torch.float32)).square().mean().backward()
        optimizer.step()

    model, optimizer = half_frozen()
    step(model, optimizer, 0)
    model.requires_grad_(True)
    step(model, optimizer, 1)
    pk.checkpoint.save(path, model, optimizer)
    step(model, optimizer, 2)
    other, resumed = half_frozen()
    refusal = ranks.message_of(
        pk.checkpoint.CheckpointError, lambda: pk.checkpoint.load(path, other, resumed)
    )
    assert "it has state of 0.weight, which is frozen here" in refusal
    other.requires_grad_(True)
    pk.checkpoint.load(path, other, resumed)
    step(other, resumed, 2)
    return [ranks.digest(list(m.parameters())) for m in (model, other)]


@pytest.mark.parametrize("size", [1, 2])
def test_what_thawed_before_the_load_is_loaded_too(tmp_path: Path, size: int) -> None:
    found = run_ranks(thaw_and_resume, size, str(tmp_path))
    assert ranks.same([digest for told in found for digest in told])
