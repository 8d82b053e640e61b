"""The state of ShardedAdamW: torch.optim.AdamW's format, both ways, at any world size."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks
import torch
from torch import nn

import parallelkit as pk
from parallelkit.testing import virtual_ranks

SHAPES = [[(10,), (7,), (1,)], [(1000,), *[(1,)] * 9], [(3, 5, 7), (0,), (2600, 2)]]


def parameters_of(shapes: Any, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [
        nn.Parameter(ranks.random(i, 0, s, torch.float64).to(dtype)) for i, s in enumerate(shapes)
    ]


def run(parameters: list[nn.Parameter], optimizer: Any, steps: range) -> None:
    for step in steps:
        for i, p in enumerate(parameters):
            p.grad = ranks.random(100 * step + i, 0, tuple(p.shape), torch.float64).to(p.dtype)
        optimizer.step()


def train(group: pk.Group, shapes: Any, first: int, last: int, saved: Any, **options: Any) -> Any:
    """Parameters and state after steps first to last, from what was saved if anything was."""
    parameters = parameters_of(shapes, options.pop("dtype", torch.float32))
    optimizer = pk.ShardedAdamW(parameters, lr=0.01, group=group, **options)
    if saved is not None:
        values, state = saved
        with torch.no_grad():
            for p, value in zip(parameters, values, strict=True):
                p.copy_(value)
        optimizer.load_state_dict(copy.deepcopy(state))
    run(parameters, optimizer, range(first, last))
    return [p.detach().clone() for p in parameters], optimizer.state_dict()


def assert_same(a: Any, b: Any) -> None:
    for p, q in zip(a[0], b[0], strict=True):
        assert torch.equal(p, q)
    assert a[1]["param_groups"] == b[1]["param_groups"]
    assert a[1]["state"].keys() == b[1]["state"].keys()
    for index, entry in a[1]["state"].items():
        assert entry.keys() == b[1]["state"][index].keys()
        assert all(torch.equal(v, b[1]["state"][index][k]) for k, v in entry.items())


@pytest.mark.parametrize("shapes", SHAPES, ids=["10-7-1", "1000-and-ones", "odd"])
@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64, "maximize": True},
        {"state_dtype": torch.bfloat16},
        {"state_dtype": "int8"},
    ],
    ids=["amsgrad", "bf16", "f64", "bf16-state", "int8-state"],
)
def test_training_goes_on_at_any_world_size_as_if_never_interrupted(
    shapes: Any, options: dict[str, Any]
) -> None:
    (whole,) = virtual_ranks(lambda g: train(g, shapes, 0, 6, None, **options), 1)
    saved = virtual_ranks(lambda g: train(g, shapes, 0, 3, None, **options), 4)
    for one in saved[1:]:
        assert_same(one, saved[0])
    for size in (4, 3, 2, 1):
        for after in virtual_ranks(lambda g: train(g, shapes, 3, 6, saved[0], **options), size):
            assert_same(after, whole)


@pytest.mark.parametrize("window", [1, 255, 777])
def test_state_is_gathered_in_windows_of_any_length(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one begins within a block of quantised state."""
    shapes = [(5000,), (3,), (41, 101)] if window > 1 else [(300,), (3,)]
    monkeypatch.setattr("parallelkit.optimizer_state._SMALL", 256)
    (whole,) = virtual_ranks(lambda g: train(g, shapes, 0, 2, None, state_dtype="int8"), 1)
    monkeypatch.setattr("parallelkit.optimizer_state._WINDOW", window)
    for found in virtual_ranks(lambda g: train(g, shapes, 0, 2, None, state_dtype="int8"), 3):
        assert_same(found, whole)


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_state_loads_here_and_ours_there(fused: bool) -> None:
    ours, theirs = parameters_of(SHAPES[0]), parameters_of(SHAPES[0])
    optimizer = pk.ShardedAdamW([{"params": ours[:2], "weight_decay": 0.3}, {"params": ours[2:]}])
    other = torch.optim.AdamW(
        [{"params": theirs[:2], "weight_decay": 0.3}, {"params": theirs[2:]}], fused=fused
    )
    run(theirs, other, range(3))
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    optimizer.load_state_dict(other.state_dict())
    step = optimizer.state_dict()["state"][0]["step"]
    assert step.device.type == "cpu" and step == 3.0 and step.shape == ()
    run(ours, optimizer, range(3, 5))
    run(theirs, other, range(3, 5))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-7)
    back = torch.optim.AdamW([{"params": theirs[:2]}, {"params": theirs[2:]}], fused=fused)
    back.load_state_dict(optimizer.state_dict())
    assert back.param_groups[0]["weight_decay"] == 0.3
    run(ours, optimizer, range(5, 6))
    run(theirs, back, range(5, 6))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-7)


def test_a_parameter_that_never_stepped_has_no_entry() -> None:
    parameters = parameters_of(SHAPES[0])
    optimizer = pk.ShardedAdamW(parameters)
    assert len(optimizer.state) == 3, "tools that find an empty state would step the optimizer"
    fresh = optimizer.state_dict()["state"]
    assert list(fresh) == [0, 1, 2], "torch.distributed.checkpoint reads into these"
    assert not any(entry.any() for state in fresh.values() for entry in state.values())
    parameters[1].grad = torch.ones(7)
    optimizer.step()
    assert list(optimizer.state_dict()["state"]) == [1]


def set_to(parameters: list[nn.Parameter], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for p, value in zip(parameters, values, strict=True):
            p.copy_(value)


def load_both(group: pk.Group, saved: Any, order: str) -> Any:
    """Into bfloat16 parameters that held something else."""
    parameters = [nn.Parameter(p * 0 + 7) for p in parameters_of(SHAPES[1], torch.bfloat16)]
    optimizer = pk.ShardedAdamW(parameters, lr=0.01, group=group)
    run(parameters, optimizer, range(50, 52))
    for part in order.split(", "):
        if part == "model":
            set_to(parameters, saved[0])
        else:
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
    loaded = [p.detach().clone() for p in parameters], optimizer.state_dict()
    run(parameters, optimizer, range(3, 5))
    return loaded, ([p.detach().clone() for p in parameters], optimizer.state_dict())


@pytest.mark.parametrize("order", ["model, optimizer", "optimizer, model"])
def test_model_and_optimizer_load_in_either_order(order: str) -> None:
    """Before any step parameters are the masters rounded, on every rank; masters stay float32."""
    saved = virtual_ranks(lambda g: train(g, SHAPES[1], 0, 3, None, dtype=torch.bfloat16), 2)[0]
    (wanted,) = virtual_ranks(lambda g: train(g, SHAPES[1], 0, 5, None, dtype=torch.bfloat16), 1)
    for loaded, later in virtual_ranks(lambda g: load_both(g, saved, order), 3):
        assert_same(loaded, saved)
        assert_same(later, wanted)
        for p, entry in zip(loaded[0], loaded[1]["state"].values(), strict=True):
            assert all(entry[k].dtype == torch.float32 for k in entry)
            assert torch.equal(p, entry["master_param"].bfloat16())
            assert not torch.equal(p.float(), entry["master_param"])


@pytest.mark.parametrize("order", ["model, optimizer", "optimizer, model"])
@pytest.mark.parametrize("through_torch", [False, True], ids=["by-hand", "through-torch"])
def test_masters_older_than_the_parameters_do_not_undo_them(
    order: str, through_torch: bool
) -> None:
    """Element by element: where a parameter is its master rounded, the master counts."""
    (values, state), *_ = virtual_ranks(
        lambda g: train(g, SHAPES[1], 0, 3, None, dtype=torch.bfloat16), 2
    )
    newer = [nn.Parameter(value) for value in values]
    if through_torch:
        other = torch.optim.AdamW(newer, lr=0.01)
        other.load_state_dict(copy.deepcopy(state))
        run(newer, other, range(3, 5))
        state = other.state_dict()
        assert not torch.equal(state["state"][0]["master_param"].bfloat16(), newer[0])
    else:
        set_to(newer, [torch.where(torch.arange(len(p)) % 3 == 0, p + 1, p) for p in values])
    now = [p.detach() for p in newer]
    for loaded, _ in virtual_ranks(lambda g: load_both(g, (now, state), order), 2):
        for p, value, entry in zip(loaded[0], now, loaded[1]["state"].values(), strict=True):
            assert torch.equal(p, value)
            assert torch.equal(entry["master_param"].bfloat16(), value)
        if not through_torch:
            kept = torch.arange(1000) % 3 != 0
            master = loaded[1]["state"][0]["master_param"][kept]
            assert torch.equal(master, state["state"][0]["master_param"][kept])
            assert not torch.equal(master, loaded[0][0][kept].float())


def test_without_masters_in_the_file_they_are_made_from_the_parameters() -> None:
    parameters = parameters_of(SHAPES[0], torch.bfloat16)
    optimizer = pk.ShardedAdamW(parameters)
    run(parameters, optimizer, range(2))
    state = optimizer.state_dict()
    for entry in state["state"].values():
        del entry["master_param"]
    optimizer.load_state_dict(state)
    for p, entry in zip(parameters, optimizer.state_dict()["state"].values(), strict=True):
        assert torch.equal(entry["master_param"], p.float())


def test_misfits_are_named_and_nothing_is_loaded() -> None:
    parameters = parameters_of(SHAPES[0])
    optimizer = pk.ShardedAdamW(parameters)
    run(parameters, optimizer, range(2))
    good = optimizer.state_dict()

    def broken(change: Any) -> dict[str, Any]:
        state = copy.deepcopy(good)
        state["param_groups"][0]["lr"] = 5.0
        change(state)
        return state

    for change, text in (
        (lambda s: s["state"][1].pop("exp_avg_sq"), r"state\[1\].*no 'exp_avg_sq'"),
        (lambda s: s["state"][2].update(exp_avg=torch.ones(3)), r"'exp_avg' of state\[2\].*\[3\]"),
        (lambda s: s["param_groups"][0]["params"].pop(), "groups of"),
        (lambda s: s.pop("state"), "every rank needs the whole"),
        (lambda s: s["param_groups"][0].update(amsgrad=True), "max_exp_avg_sq"),
    ):
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(broken(change))
        now = optimizer.state_dict()
        assert now["param_groups"] == good["param_groups"]
        assert torch.equal(now["state"][2]["exp_avg"], good["state"][2]["exp_avg"])


def test_rank_0_alone_can_have_the_state() -> None:
    shapes = SHAPES[2]

    def on_rank_0(group: pk.Group) -> Any:
        parameters = parameters_of(shapes)
        optimizer = pk.ShardedAdamW(parameters, group=group)
        run(parameters, optimizer, range(1))
        return optimizer.state_dict(rank0_only=True), optimizer.state_dict()

    (first, whole), (second, _) = virtual_ranks(on_rank_0, 2)
    assert second == {}
    assert torch.equal(first["state"][2]["exp_avg"], whole["state"][2]["exp_avg"])


def test_hooks_of_state_dicts_run_once() -> None:
    optimizer = pk.ShardedAdamW(parameters_of(SHAPES[0]))
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("a"))
    optimizer.register_state_dict_post_hook(lambda _, s: seen.append("b") or s)
    optimizer.register_load_state_dict_pre_hook(lambda _, s: seen.append("c") or s)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("d"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["a", "b", "c", "d"]
