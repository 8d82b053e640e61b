"""Checkpoints of models split over tensor-parallel ranks, and fully sharded: any layout reads them.

The oracle is the unsplit model: torch.optim.AdamW in one process and float64, on the batch of all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import parallelkit as pk
from parallelkit.testing import run_ranks
from parallelkit.train.model import PLAN, VOCABULARY, ByteGPT

BATCH = 4
LR = 0.01


def model_of(seed: int, dtype: torch.dtype) -> ByteGPT:
    """Fused projections, a vocabulary that no number of ranks divides, tied ends."""
    torch.manual_seed(seed)
    return ByteGPT(width=16, depth=1, heads=4).to(dtype)


def loss_of(model: nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
    """Of this rank's rows of a batch."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, 7), generator=generator)[rank::size]
    loss: torch.Tensor = model(tokens[:, :-1], tokens[:, 1:])
    return loss


class Run:
    """A model on a dp x tp mesh; without splitting where tp is 1."""

    def __init__(self, group: pk.Group, tp: int, seed: int, dtype: torch.dtype) -> None:
        shape = (group.size // tp, tp)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        self.data = pk.Group.from_mesh(mesh["dp"])
        module = model_of(seed, dtype)
        if tp > 1:
            pk.tensor_parallel(module, pk.Group.from_mesh(mesh["tp"]), PLAN)
        self.model = pk.DataParallel(module, self.data)
        self.optimizer = pk.ShardedAdamW(
            self.model.parameters(), LR, data_parallel=self.model, group=self.data
        )

    def train(self, steps: range) -> None:
        for step in steps:
            loss = loss_of(self.model, step, self.data.rank, self.data.size)
            self.model.backward(loss, BATCH / self.data.size)
            self.optimizer.step()

    def digest(self) -> str:
        state = self.optimizer.state_dict()["state"].values()
        return ranks.digest(
            [*self.model.state_dict().values(), *(t for e in state for t in e.values())]
        )


def save_and_go_on(group: pk.Group, tp: int, path: str, dtype: torch.dtype) -> tuple[str, Any]:
    """The hash after 4 steps, having saved after 2, and the weights of then."""
    run = Run(group, tp, 1, dtype)
    run.train(range(2))
    pk.checkpoint.save(path, run.model, run.optimizer, extra=2)
    weights = pk.gather_state_dict(run.model)
    run.train(range(2, 4))
    return run.digest(), weights


def read(
    group: pk.Group, tp: int, path: str, dtype: torch.dtype, steps: int
) -> tuple[str, Any, Any]:
    """The hash after some more steps; weights as they were read, and state where it is whole."""
    run = Run(group, tp, 9, dtype)
    assert pk.checkpoint.load(path, run.model, run.optimizer) == 2
    weights = pk.gather_state_dict(run.model)
    state = run.optimizer.state_dict() if tp == 1 else None
    run.train(range(2, 2 + steps))
    return run.digest(), weights, state


def expected() -> tuple[ByteGPT, dict[str, Any]]:
    """The unsplit model after 2 steps, and torch's state of it."""
    model = model_of(1, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step, 0, 1).backward()
        optimizer.step()
    return model, optimizer.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_every_layout_reads_what_a_mesh_wrote(tmp_path: Path, dtype: torch.dtype) -> None:
    path = str(tmp_path)
    saved = run_ranks(save_and_go_on, 4, 2, path, dtype)
    again = run_ranks(read, 4, 2, path, dtype, 2)
    assert [digest for digest, _, _ in again] == [digest for digest, _ in saved], "goes on exactly"
    layouts = [again, run_ranks(read, 1, 1, path, dtype, 0), run_ranks(read, 3, 1, path, dtype, 0),
               run_ranks(read, 4, 4, path, dtype, 0)]  # fmt: skip
    for found in layouts:
        for _, weights, _ in found:
            assert weights.keys() == saved[0][1].keys()
            assert all(torch.equal(weights[n], t) for n, t in saved[0][1].items())
    if dtype == torch.bfloat16:
        for _, weights, state in layouts[1]:
            for parameter, entry in zip(
                model_of(1, dtype).named_parameters(), state["state"].values(), strict=True
            ):
                assert torch.equal(entry["master_param"].bfloat16(), weights[parameter[0]])
                assert not torch.equal(entry["master_param"], weights[parameter[0]].float())
    else:
        model, wanted = expected()
        for _, weights, state in (*layouts[1], *layouts[2]):
            for name, tensor in model.state_dict().items():
                torch.testing.assert_close(weights[name].double(), tensor, rtol=2e-4, atol=1e-5)
            assert state["state"].keys() == wanted["state"].keys()
            for index, entry in wanted["state"].items():
                for key, value in entry.items():
                    torch.testing.assert_close(
                        state["state"][index][key].to(value.dtype), value, rtol=1e-3, atol=1e-8
                    )


def test_a_mesh_reads_what_one_process_wrote(tmp_path: Path) -> None:
    path = str(tmp_path)
    ((_, weights),) = run_ranks(save_and_go_on, 1, 1, path, torch.float32)
    for _, found, _ in run_ranks(read, 4, 2, path, torch.float32, 1):
        assert all(torch.equal(found[n], t) for n, t in weights.items())


def save_in_part(group: pk.Group, path: str) -> list[str]:
    run = Run(group, 2, 1, torch.float32)
    heard = [
        ranks.message_of(
            ValueError, lambda: pk.checkpoint.save(path, run.model, run.optimizer, group=run.data)
        )
    ]
    for parameter in run.model.parameters():
        if hasattr(parameter, "tp_split"):
            del parameter.tp_split
    heard.append(
        ranks.message_of(ValueError, lambda: pk.checkpoint.save(path, run.model, run.optimizer))
    )
    return heard


def test_what_is_not_whole_is_refused_on_every_rank_before_anything_is_written(
    tmp_path: Path,
) -> None:
    for part, unknown in run_ranks(save_in_part, 4, str(tmp_path / "c")):
        assert "the 2 ranks of the group hold" in part and "model.embedding.weight" in part
        assert "no tp_split" in unknown
    assert not list((tmp_path / "c").iterdir())


# -- fully sharded ---------------------------------------------------------------------------------


def plain_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))


def train_plain(model: nn.Module, optimizer: Any, steps: range, rank: int, size: int) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        x = torch.randn(BATCH, 7, generator=torch.Generator().manual_seed(step))[rank::size]
        optimizer.zero_grad()
        model(x.to(dtype)).square().mean().backward()
        optimizer.step()


def sharded(seed: int, dtype: torch.dtype) -> tuple[nn.Module, pk.ShardedAdamW]:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(plain_model(seed).to(dtype))
    return model, pk.ShardedAdamW(model.parameters(), LR)


def whole_digest(model: nn.Module, optimizer: pk.ShardedAdamW) -> str:
    entries = [e for s in optimizer.state_dict()["state"].values() for e in s.values()]
    tensors = [*model.state_dict().values(), *entries]
    return ranks.digest([t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors])


def save_sharded(group: pk.Group, path: str, dtype: torch.dtype) -> list[str]:
    """Through both kinds of checkpoint, each read into another model; hashes after more steps."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = sharded(1, dtype)
    train_plain(model, optimizer, range(2), group.rank, group.size)
    pk.checkpoint.save(f"{path}/ours", model, optimizer)
    parts = get_state_dict(model, optimizer)
    dcp.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=f"{path}/torch")
    runs = [(model, optimizer)]
    for kind in ("ours", "torch"):
        model, optimizer = sharded(2, dtype)
        if kind == "ours":
            pk.checkpoint.load(f"{path}/ours", model, optimizer)
        else:
            parts = get_state_dict(model, optimizer)
            dcp.load({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=f"{path}/torch")
            set_state_dict(model, optimizer, model_state_dict=parts[0], optim_state_dict=parts[1])
        runs.append((model, optimizer))
    for model, optimizer in runs:
        train_plain(model, optimizer, range(2, 4), group.rank, group.size)
    return [whole_digest(*run) for run in runs]


def read_sharded(group: pk.Group, path: str, dtype: torch.dtype) -> str:
    model, optimizer = sharded(2, dtype)
    pk.checkpoint.load(f"{path}/ours", model, optimizer)
    return whole_digest(model, optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_fully_sharded_parameters_pass_through_both_kinds_of_checkpoint(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    found = run_ranks(save_sharded, 2, str(tmp_path), dtype)
    assert ranks.same([digest for rank in found for digest in rank])
    model = plain_model(3).to(dtype)
    optimizer = pk.ShardedAdamW(model.parameters(), LR)
    pk.checkpoint.load(tmp_path / "ours", model, optimizer)
    whole = whole_digest(model, optimizer)
    assert run_ranks(read_sharded, 3, str(tmp_path), dtype) == [whole] * 3
    if dtype == torch.float32:
        reference = plain_model(1).double()
        other = torch.optim.AdamW(reference.parameters(), LR)
        train_plain(reference, other, range(2), 0, 1)
        for (name, found_), wanted in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            torch.testing.assert_close(found_.double(), wanted, rtol=2e-4, atol=1e-5, msg=name)
        for index, entry in other.state_dict()["state"].items():
            moment = optimizer.state_dict()["state"][index]["exp_avg"]
            torch.testing.assert_close(moment.double(), entry["exp_avg"], rtol=1e-4, atol=1e-8)
