"""Whatever a call is given: bad input on one rank, or on all, is one error of ours on every rank,
raised before anything changes, with the group usable after.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import message_of, same
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import parallelkit as pk
from parallelkit.checkpoint import CheckpointError
from parallelkit.testing import run_ranks

F = pk.nn.functional
# Of a call: what it raises, a part of what that says, good and bad arguments, and the call of them.
Case = tuple[type[Exception], str, Any, Any, Callable[[Any], object]]


def exchanges(group: pk.Group, folder: Path) -> dict[str, Case]:
    x = torch.ones(4, 6)
    whole = torch.ones(4, 12)

    def gather(options: dict[str, Any]) -> torch.Tensor:
        return F.gather_from_group(x, group, **options)

    return {
        "gather's dim": (ValueError, "dim must be in [-2, 2)", {}, {"dim": 5}, gather),
        "gather's kind of dim": (TypeError, "dim must be an int", {}, {"dim": "rows"}, gather),
        "gather's grad": (ValueError, 'grad must be "repl', {}, {"grad": "sum"}, gather),
        "gather's length": (ValueError, "at least 0", {"length": 12}, {"length": -1}, gather),
        "gather's length, cut": (ValueError, "long, got 6", {"length": 12}, {"length": 3}, gather),
        "gathered text": (TypeError, "x must be a tensor, got str", x, "x",
                          lambda t: F.gather_from_group(t, group)),
        "gathered integers": (TypeError, "got torch.int64", x, x.long(),
                              lambda t: F.gather_from_group(t, group)),
        "scatter's dim": (ValueError, "dim must be in", -1, 2,
                          lambda dim: F.reduce_scatter_to_group(whole, group, dim)),
        "scattered integers": (TypeError, "got torch.int64", whole, whole.long(),
                               lambda t: F.reduce_scatter_to_group(t, group)),
        "no sum": (TypeError, "x must be a tensor", torch.ones(90_000), [1.0],  # needs memory first
                   lambda t: F.reduce_from_group(t, group)),
        "summed integers": (TypeError, "got torch.int32", x, x.int(),
                            lambda t: F.reduce_from_group(t, group)),
    }  # fmt: skip


def losses(group: pk.Group, folder: Path) -> dict[str, Case]:
    logits, target = torch.ones(2, 3), torch.tensor([0, 4])
    bad: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
        "float target": (TypeError, "int64 targets", {"target": target.float()}),
        "no target": (TypeError, "target must be a tensor", {"target": [0, 4]}),
        "target's shape": (ValueError, "target [...]", {"target": target[:1]}),
        "target's range": (ValueError, "target must be in [0, 6)", {"target": target + 5}),
        "integer logits": (TypeError, "wanted float logits", {"logits_shard": logits.long()}),
        "no logits": (TypeError, "logits_shard must be a tensor", {"logits_shard": None}),
        "smoothing": (ValueError, "number in [0, 1], got 1.5", {"label_smoothing": 1.5}),
        "smoothing of NaN": (ValueError, "[0, 1], got nan", {"label_smoothing": math.nan}),
        "kind of smoothing": (ValueError, "number in [0, 1]", {"label_smoothing": "0.1"}),
        "reduction": (ValueError, '"mean", "sum" or "none"', {"reduction": "max"}),
        "ignore_index": (TypeError, "ignore_index must be an int", {"ignore_index": "pad"}),
    }  # fmt: skip
    good = {"logits_shard": logits, "target": target}

    def loss(changed: dict[str, Any]) -> torch.Tensor:
        return F.vocab_parallel_cross_entropy(**(good | changed), group=group)

    return {name: (kind, part, {}, changed, loss) for name, (kind, part, changed) in bad.items()}


def layers(group: pk.Group, folder: Path) -> dict[str, Case]:
    found: dict[str, Case] = {}
    ids = torch.tensor([[0, 4]])
    for kind in (pk.nn.VocabParallelEmbedding, pk.nn.FeatureParallelEmbedding):
        table, name = kind(5, 3, group=group), kind.__name__
        found[f"{name}, range"] = IndexError, "[0, 5), got 5", ids, ids + 1, table
        found[f"{name}, float"] = TypeError, "ids must be int64", ids, ids.float(), table
        found[f"{name}, no tensor"] = TypeError, "ids must be a tensor", ids, [[0, 4]], table
    x = torch.ones(2, 3)
    column, row = pk.nn.ColumnParallelLinear, pk.nn.RowParallelLinear
    for name, layer in {
        "row": row(6, 4, group=group),
        "row of shards": row(6, 4, group=group, sequence_parallel=True),
        "row of whole": row(3, 4, group=group, input_is_parallel=False),
        "column that gathers": column(3, 4, group=group, gather_output=True),
        "column of shards": column(3, 4, group=group, sequence_parallel=True),
    }.items():
        found[f"{name}, dtype"] = TypeError, "one float dtype", x, x.double(), layer
        found[f"{name}, integers"] = TypeError, "", x, x.long(), layer
        found[f"{name}, no tensor"] = TypeError, "x must be a tensor", x, "x", layer
        found[f"{name}, width"] = ValueError, "weight [N, K]", x, torch.ones(2, 9), layer
        if layer.sequence_parallel:
            found[f"{name}, 1-D"] = ValueError, "[tokens, hidden]", x, x[0], layer
    return found


def groups(group: pk.Group, folder: Path) -> dict[str, Case]:
    def empty(size: Any) -> torch.Tensor:
        return group.empty(size)

    def make(options: dict[str, Any]) -> None:
        pk.Group(**options).close()

    return {
        "text as size": (TypeError, "size must be an int, got str", 3, "abc", empty),
        "negative size": (ValueError, "size must be at least 0, got -1", 3, -1, empty),
        "half a size": (TypeError, "size must be an int, got float", 3, 3.5, empty),
        "no size": (TypeError, "size must be an int, got NoneType", 3, None, empty),
        "no dtype": (TypeError, "dtype must be a torch.dtype", torch.int8, "int8",
                     lambda dtype: group.empty(3, dtype=dtype)),
        "timeout": (TypeError, "timeout must be", {}, {"timeout": "1"}, make),
        "algorithm": (TypeError, "algorithm must be a string", {}, {"algorithm": 1}, make),
        "device": (ValueError, "device must name", {}, {"device": 1.5}, make),
    }  # fmt: skip


def optimizers(group: pk.Group, folder: Path) -> dict[str, Case]:
    module = nn.Linear(3, 2)
    optimizer = pk.ShardedAdamW(module.parameters(), lr=0.0, group=group)
    other = [nn.Parameter(torch.ones(3))]

    def make(options: dict[str, Any]) -> object:
        return pk.ShardedAdamW(**({"params": other, "group": group} | options))

    def step(options: dict[str, Any]) -> None:
        before = dict(optimizer.param_groups[0])
        optimizer.param_groups[0].update(options)
        for name in options.get("without", ()):
            del optimizer.param_groups[0][name]
        optimizer.max_grad_norm = options.get("max_grad_norm")
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        try:
            optimizer.step()
        finally:
            optimizer.param_groups[0].update(before)

    bad: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
        "lr": (TypeError, "lr must be a number, got 'x'", {"lr": "x"}),
        "two learning rates": (TypeError, "lr must be a number", {"lr": torch.ones(2)}),
        "three betas": (TypeError, "betas must be two numbers", {"betas": (0.9, 0.9, 0.9)}),
        "one beta": (TypeError, "betas must be two numbers", {"betas": (0.9,)}),
        "a beta's kind": (TypeError, "beta2 must be a number", {"betas": (0.9, None)}),
        "eps": (TypeError, "eps must be a number", {"eps": "1e-8"}),
        "norm": (ValueError, "max_grad_norm must be above 0", {"max_grad_norm": -1}),
        "norm of NaN": (ValueError, "above 0 or None, got nan", {"max_grad_norm": math.nan}),
        "norm's kind": (ValueError, "above 0 or None, got '1'", {"max_grad_norm": "1"}),
    }
    found = {f"made with bad {n}": (k, part, {}, o, make) for n, (k, part, o) in bad.items()}
    found |= {f"step with bad {n}": (k, part, {}, o, step) for n, (k, part, o) in bad.items()}
    for name in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"):
        part = f"step: the parameter group has no {name}"
        found[f"step without {name}"] = ValueError, part, {}, {"without": [name]}, step
    saved = optimizer.state_dict()

    def load(options: dict[str, Any]) -> None:
        optimizer.load_state_dict(
            {"state": {}, "param_groups": [saved["param_groups"][0] | options]}
        )

    found |= {
        "step with lr of NaN": (TypeError, "lr must be a number, got nan", {},
                                {"lr": math.nan}, step),
        "step with a complex lr": (TypeError, "lr must be a number", {},
                                   {"lr": torch.tensor(1j)}, step),
        "loaded lr": (TypeError, "load_state_dict: lr must be a number, got 'q'", {},
                      {"lr": "q"}, load),
        "negative eps": (ValueError, "epsilon", {}, {"eps": -1.0}, make),
        "state_dtype": (ValueError, "state_dtype must be", {}, {"state_dtype": ["int8"]}, make),
        "master_weights": (ValueError, "master_weights must", {}, {"master_weights": []}, make),
        "a group's betas": (TypeError, "betas must be two numbers", {},
                            {"params": [{"params": other, "betas": 0.9}]}, make),
        "in two groups": (ValueError, "more than one parameter group", {},
                          {"params": [{"params": other}, {"params": other}]}, make),
    }  # fmt: skip
    return found


def checkpoints(group: pk.Group, folder: Path) -> dict[str, Case]:
    model = nn.Linear(3, 2)
    optimizer = pk.ShardedAdamW(model.parameters(), group=group)
    good = {"path": folder / "saved", "model": model, "optimizer": optimizer, "group": group}
    pk.checkpoint.save(**good)
    bad: dict[str, tuple[str, dict[str, Any]]] = {
        "model": ("model must be a torch.nn.Module, got str", {"model": "model"}),
        "optimizer": ("must be a parallelkit.ShardedAdamW or None", {"optimizer": "adam"}),
        "torch's optimizer": ("torch.save", {"optimizer": torch.optim.SGD(model.parameters())}),
        "path": ("path must be a str or os.PathLike, got int", {"path": 3}),
    }
    found: dict[str, Case] = {}
    for call in (pk.checkpoint.save, pk.checkpoint.load):
        for name, (part, changed) in bad.items():
            found[f"{call.__name__}, {name}"] = (
                TypeError, part, {}, changed, lambda c, call=call: call(**(good | c))
            )  # fmt: skip
        part, changed = bad["torch's optimizer"]
        found[f"{call.__name__}, torch's optimizer where the others' has a group of its own"] = (
            TypeError, part, {}, changed,
            lambda c, call=call: call(**(good | {"group": None} | c)),
        )  # fmt: skip
    alone, other = good | {"optimizer": None}, {"model": nn.Linear(4, 2)}
    found["load another's"] = (
        CheckpointError, "model.weight must have shape [2, 4], got [2, 3]", {}, other,
        lambda changed: pk.checkpoint.load(**(alone | changed)),
    )  # fmt: skip
    return found


def wrappers(group: pk.Group, folder: Path) -> dict[str, Case]:
    plan = {"0": "colwise", "1": "rowwise"}

    def split(options: dict[str, Any]) -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)).requires_grad_(False)
        for p in module.parameters():
            p.fill_(1.0)
        return pk.tensor_parallel(**({"model": module, "group": group, "plan": plan} | options))

    model = DistributedDataParallel(nn.Linear(3, 2, bias=False))
    state, hook = pk.ddp_comm_hook(group)
    model.register_comm_hook(state, hook)

    def backward(weight: Any) -> None:
        state.weight = weight
        model(torch.ones(1, 3)).sum().backward()

    def wrap(options: dict[str, Any]) -> pk.DataParallel:
        return pk.DataParallel(nn.Linear(2, 2), group, **options)

    return {
        "no model": (TypeError, "model must be a torch.nn.Module", {}, {"model": "x"}, split),
        "no plan": (ValueError, 'plan must be "auto" or', {}, {"plan": 3}, split),
        "a list as plan": (ValueError, 'plan must be "auto" or', {}, {"plan": ["0"]}, split),
        "no style": (TypeError, "plan must map names", {}, {"plan": {"0": 1}}, split),
        "no name": (TypeError, "plan must map names", {}, {"plan": {0: "colwise"}}, split),
        "bucket of nothing": (ValueError, "bucket_mb", {}, {"bucket_mb": 0}, wrap),
        "bucket of text": (ValueError, "bucket_mb", {}, {"bucket_mb": "x"}, wrap),
        "the hook's weight of text": (TypeError, "weight must be an int", 1, "x", backward),
        "the hook's weight of nothing": (TypeError, "got NoneType", 1, None, backward),
    }  # fmt: skip


def refusals(group: pk.Group, topic: Any, folder: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """What has to be said where the last rank does something wrong, and where all do; and is."""
    with pk.Group(timeout=timedelta(seconds=20)) as group:
        told = {}
        for name, (kind, part, good, bad, call) in topic(group, folder).items():
            for who, wrong in (("last", group.rank == group.size - 1), ("all", True)):
                given = bad if wrong else good
                told[name, who] = part, message_of(kind, lambda c=call, g=given: c(g))
                assert F.reduce_from_group(torch.ones(1), group).item() == group.size, name
            call(good)
        return told


TOPICS = (exchanges, losses, layers, groups, optimizers, checkpoints, wrappers)


@pytest.mark.parametrize(
    ("topic", "algorithm"),
    [*((topic, "auto") for topic in TOPICS), (layers, "reference")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_bad_input_on_one_rank_or_on_all_is_one_error_on_every_rank(
    topic, algorithm, tmp_path, monkeypatch
):
    monkeypatch.setenv("PARALLELKIT_ALGORITHM", algorithm)
    told = run_ranks(refusals, 2, topic, tmp_path)
    assert same(told)
    for (name, who), (part, text) in told[0].items():
        assert part in text, (name, who)
        where = "[rank 1 of 2]" if who == "last" else "[rank 0 of 2]"
        assert text.count("[rank ") == 1 and where in text, (name, who)


LAYERS: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "negative": (ValueError, "in_features must be at least 0, got -6",
                 lambda: pk.nn.ColumnParallelLinear(-6, 4)),
    "half": (TypeError, "out_features must be an int, got float",
             lambda: pk.nn.RowParallelLinear(6, 4.0)),
    "dtype": (TypeError, "dtype must be a floating-point dtype",
              lambda: pk.nn.RowParallelLinear(6, 4, dtype=torch.int64)),
    "device": (ValueError, "device must name a device",
               lambda: pk.nn.ColumnParallelLinear(6, 4, device="tpu9")),
    "activation": (ValueError, "activation must be relu",
                   lambda: pk.nn.ColumnParallelLinear(6, 4, activation=["relu"])),
    "no layer": (TypeError, "linear must be an nn.Linear, got str",
                 lambda: pk.nn.RowParallelLinear.from_linear("x")),
    "table": (ValueError, "num_embeddings must be at least 0",
              lambda: pk.nn.VocabParallelEmbedding(-5, 2)),
    "padding": (ValueError, "padding_idx must be within the 5 embeddings, got 'x'",
                lambda: pk.nn.VocabParallelEmbedding(5, 2, "x")),
    "no table": (TypeError, "embedding must be an nn.Embedding",
                 lambda: pk.nn.FeatureParallelEmbedding.from_embedding(nn.Linear(2, 2))),
    "column's x": (ValueError, "weight [N, K]",
                   lambda: pk.nn.ColumnParallelLinear(6, 4)(torch.ones(2, 9))),
    "linear's x": (TypeError, "linear: x must be a tensor",
                   lambda: F.linear("x", torch.ones(2, 2))),
    "linear's W": (TypeError, "weight must be a tensor, got None",
                   lambda: F.linear(torch.ones(2, 2), None)),
    "linear's act": (ValueError, "activation must be",
                     lambda: F.linear(torch.ones(2, 2), torch.ones(2, 2), activation=[])),
    "scatter": (TypeError, "scatter_to_group: x must be", lambda: F.scatter_to_group([1.0])),
    "copy": (TypeError, "copy_to_group: x must be", lambda: F.copy_to_group(None)),
    "group": (TypeError, "process_group must be a torch.distributed.ProcessGroup",
              lambda: pk.Group("world")),
    "mesh": (TypeError, "device_mesh must be a DeviceMesh", lambda: pk.Group.from_mesh("dp")),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_what_communicates_nothing_refuses_bad_input_where_it_is_given(name):
    kind, part, call = LAYERS[name]
    assert part in message_of(kind, call)


def different(group: pk.Group, folder: Path) -> list[str]:
    """Where each rank's input is good, but not the others'."""
    told = []
    rank, mismatch = group.rank, pk.CollectiveMismatchError
    for options in ({"reduction": ("sum", "mean")[rank]}, {"label_smoothing": 0.1 * rank}):
        arguments = torch.ones(2, 3), torch.tensor([0, 4])
        told.append(
            message_of(
                mismatch,
                lambda a=arguments, o=options: F.vocab_parallel_cross_entropy(*a, group=group, **o),
            )
        )
    x = torch.ones(3, 3)
    told.append(message_of(mismatch, lambda: F.gather_from_group(x, group, rank)))
    save = pk.checkpoint.save
    told.append(message_of(mismatch, lambda: save(folder / "a", nn.Linear(3, 2 + rank))))
    model = nn.Linear(3, 2)
    optimizer = pk.ShardedAdamW(model.parameters())
    told.append(
        message_of(mismatch, lambda: save(folder / "a", model, optimizer if rank else None))
    )
    assert not pk.checkpoint.exists(folder / "a")
    save(folder / "a", model, extra=rank)
    optimizer.max_grad_norm = 1.0 + rank
    told.append(message_of(mismatch, optimizer.step))
    assert pk.checkpoint.load(folder / "a", model) == 0
    optimizer.max_grad_norm = None
    load = pk.checkpoint.load
    told.append(
        message_of(mismatch, lambda: load(folder / "a", model, optimizer if rank else None))
    )
    told.append(
        message_of(mismatch, lambda: pk.ShardedAdamW(model.parameters(), amsgrad=bool(rank)))
    )
    state = optimizer.state_dict()
    state["param_groups"][0]["eps"] *= 1 + rank
    told.append(message_of(mismatch, lambda: optimizer.load_state_dict(state)))
    steps = [{"step": 1.0 + rank, "exp_avg": p, "exp_avg_sq": p} for p in model.parameters()]
    groups = optimizer.state_dict()["param_groups"]
    state = {"state": dict(enumerate(steps)), "param_groups": groups}
    told.append(message_of(mismatch, lambda: optimizer.load_state_dict(state)))
    return told


def test_good_input_that_differs_between_ranks_is_told_apart(tmp_path):
    told = run_ranks(different, 2, tmp_path)
    assert same(told)
    parts = (
        "vocab_parallel_cross_entropy: rank 1 differs from rank 0: reduction='mean' instead of",
        "label_smoothing=0.1 instead of label_smoothing=0.0",
        "dim=1 instead of dim=0",
        "float32[2, 3] on rank 0 and float32[3, 3] on rank 1",
        "an optimizer of 1 groups instead of no optimizer",
        "max_grad_norm=2.0 instead of max_grad_norm=1.0",
        "an optimizer of 1 groups instead of no optimizer",
        "amsgrad=True instead of amsgrad=False",
        "eps=2e-08 in group 0 instead of eps=1e-08",
        "step counts [2.0, 2.0] instead of step counts [1.0, 1.0]",
    )
    for text, part in zip(told[0], parts, strict=True):
        assert part in text


def in_a_child(group: pk.Group) -> list[float]:
    """A forked child runs backward on what it shares with its parent."""
    model = pk.DataParallel(nn.Linear(2, 1, bias=False), group)
    optimizer = pk.ShardedAdamW(model.parameters(), data_parallel=model)
    model.backward(model(torch.ones(1, 2)).sum(), 1)
    before = [bucket.flat.clone() for bucket in model._buckets]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            loss = model.module(torch.full((1, 2), 5.0)).sum()
            told = message_of(pk.errors.UsageError, lambda: model.backward(loss, 1))
            status = 0 if "forked" in told else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert all(torch.equal(a, b.flat) for a, b in zip(before, model._buckets, strict=True))
    optimizer.step()
    return model.module.weight.detach().flatten().tolist()


def test_a_forked_child_cannot_write_into_its_parents_gradients():
    assert same(run_ranks(in_a_child, 2))
