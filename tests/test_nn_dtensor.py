"""Split weights as DTensors on a 2 x 2 mesh, for torch's own checkpoints and FSDP2."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import message_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import parallelkit as pk
from parallelkit.testing import run_ranks

ROWS, HIDDEN = 11, 8
PLAN = {
    "0": "embedding_rowwise",
    "*.gate": "colwise",
    "*.up": "colwise",
    "*.down": "rowwise",
    "4": "colwise_gather_output",
}


class Gated(nn.Module):
    """Two projections that share their input; 5 features, which two ranks cut unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate, self.up = nn.Linear(HIDDEN, 5), nn.Linear(HIDDEN, 5, bias=False)
        self.down = nn.Linear(5, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(y)) * self.up(y))


def whole_model(seed: int, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    head = nn.Linear(HIDDEN, ROWS, bias=False)
    model = nn.Sequential(
        nn.Embedding(ROWS, HIDDEN), Gated(), Gated(), nn.LayerNorm(HIDDEN), head
    ).double()
    if tied:
        head.weight = model[0].weight
    return model


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, -1).flatten())


def batch(step: int) -> torch.Tensor:
    """Of both data-parallel ranks."""
    return torch.randint(ROWS, (2, 2, 7), generator=torch.Generator().manual_seed(step))


def differing(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    assert state.keys() == wanted.keys()
    return [n for n in wanted if not torch.allclose(state[n], wanted[n], rtol=0, atol=1e-12)]


def fully_sharded(mesh: DeviceMesh, seed: int, tied: bool) -> nn.Module:
    split = pk.tensor_parallel(whole_model(seed, tied), mesh["tp"], PLAN)
    pk.nn.install_dtensors(split)
    for layer in (split[1], split[2]):  # their whole weights are let go after each forward
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(split, mesh=mesh["dp"])


def trained_by_fsdp(group: pk.Group, folder: str, tied: bool) -> list[object]:
    """Names of what differs from the unsplit model in gradients, weights, and files."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = mesh["dp"].get_local_rank()
    whole = whole_model(0, tied)
    model, found = fully_sharded(mesh, 0, tied), []
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, whole)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, batch(step)[mine]).backward()
        sum(loss_of(whole, batch(step)[r]) / 2 for r in range(2)).backward()
        gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        found.append(differing(gradients, {n: p.grad for n, p in whole.named_parameters()}))
        for optimizer in optimizers:
            optimizer.step()
    state = {n: t.full_tensor() for n, t in get_model_state_dict(model).items()}
    found.append(differing(state, whole.state_dict()))

    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    other = fully_sharded(mesh, 1, tied)
    read = get_model_state_dict(other)
    dcp.load(read, checkpoint_id=folder)
    set_model_state_dict(other, read)
    with torch.no_grad():
        ids = batch(9)[mine]
        found.append(bool(torch.allclose(other(ids), whole(ids), rtol=0, atol=1e-12)))
    plain = whole_model(2, tied).state_dict()
    dcp.load(plain, checkpoint_id=folder)
    found.append(differing(plain, whole.state_dict()))
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_fsdp_over_the_other_dimension_trains_and_saves_the_unsplit_model(tmp_path, tied):
    wanted = [[], [], [], [], True, []]
    assert run_ranks(trained_by_fsdp, 4, str(tmp_path), tied) == [wanted] * 4


def checkpointed(group: pk.Group, folder: str) -> list[str]:
    """What differs in the unsplit model that reads what all ranks of a mesh have written."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = fully_sharded(mesh, 0, False)
    data = pk.Group.from_mesh(mesh["dp"])
    optimizer = pk.ShardedAdamW(model.parameters(), lr=0.1, group=data)
    loss_of(model, batch(0)[data.rank]).backward()
    optimizer.step()
    pk.checkpoint.save(folder, model, optimizer)
    plain = whole_model(1, False)
    pk.checkpoint.load(folder, plain, group=group)
    state = {n: t.full_tensor() for n, t in get_model_state_dict(model).items()}
    return differing(plain.state_dict(), state)


def test_a_checkpoint_is_of_the_whole_mesh_where_the_optimizer_knows_one_dimension(tmp_path):
    assert run_ranks(checkpointed, 4, str(tmp_path)) == [[]] * 4


def saved_as_views(group: pk.Group, folder: str) -> list[object]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = whole_model(0)
    model = pk.tensor_parallel(copy.deepcopy(whole), mesh["tp"], PLAN)
    views = pk.nn.as_dtensor(model)
    assert views["1.gate.weight"].device_mesh == mesh["tp"]
    dcp.save(views, checkpoint_id=folder)
    other = pk.tensor_parallel(whole_model(1), mesh["tp"], PLAN)
    dcp.load(pk.nn.as_dtensor(other), checkpoint_id=folder)
    plain = whole_model(2).state_dict()
    dcp.load(plain, checkpoint_id=folder)
    gathered = pk.gather_state_dict(other)
    return [differing(each, whole.state_dict()) for each in (gathered, plain)]


def test_views_on_a_mesh_are_saved_and_loaded_in_place_and_whole(tmp_path):
    assert run_ranks(saved_as_views, 4, str(tmp_path)) == [[[], []]] * 4


def refused(group: pk.Group) -> list[str]:
    model = pk.tensor_parallel(
        whole_model(0)[1], group, {"gate": "colwise", "up": "colwise", "down": "rowwise"}, True
    )
    parameters = list(model.parameters())
    told = [message_of(ValueError, lambda: pk.nn.install_dtensors(model))]
    told.append(message_of(ValueError, lambda: pk.nn.install_dtensors(nn.Linear(2, 2))))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    return told


def test_what_a_wrapper_would_lose_is_refused():
    for hooked, nothing in run_ranks(refused, 2):
        assert "norm.weight is summed over the ranks by a hook" in hooked
        assert "split over one group, found 0" in nothing
