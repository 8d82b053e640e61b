"""Whatever module DDP can train, and some that it cannot: gradients are those of one process."""

from __future__ import annotations

import copy
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from ranks import digest, same
from torch import nn
from training import Leaf, accumulate, gradients, items, mean_square, mlp, one_process, worst

import parallelkit as pk
from parallelkit.testing import run_ranks

CLOSE = 1e-6


class Awkward(nn.Module):
    """A tied weight, one of other strides, empty ones, one under complex arithmetic, a conv."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.empty = nn.Parameter(torch.randn(4, 0))
        self.nothing = nn.Parameter(torch.randn(0, 5))
        self.conv = nn.Conv2d(5, 3, 2).to(memory_format=torch.channels_last)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.gaps = nn.Parameter(torch.randn(5, 9)[:, ::2])

    def forward(self, x):
        h = (
            self.second(torch.tanh(self.first(x)))
            + F.linear(x, self.nothing).sum()
            + self.empty.sum()
        )
        image = h[:, :, None, None].expand(-1, -1, 2, 3)
        return {
            "h": [h @ self.transposed * self.scalar, h * self.gaps.sum(-1)],
            "image": self.conv(image.contiguous(memory_format=torch.channels_last)),
            "unrelated": "text",
        }


def awkward_loss(model, x):
    out = model(x.to(next(model.parameters()).dtype))
    return out["h"][0].square().mean() + out["h"][1].sin().mean() + out["image"].square().mean()


def awkward(group, bucket_mb, plain):
    torch.manual_seed(0)
    model = pk.DataParallel(Awkward(), group, bucket_mb=bucket_mb)
    errors = []
    for step in range(3):
        model.zero_grad()
        batches = items([3, 1, 4, 2] if not plain else [2, 2], seed=step)
        mine = batches[group.rank :: group.size]
        if plain:
            awkward_loss(model, mine[0][0]).backward()
        else:
            accumulate(model, mine, awkward_loss)
        expected = one_process(model.module, batches, awkward_loss)
        errors.append(worst(gradients(model), expected))
    strides = all(p.grad.stride() == p.stride() for n, p in model.named_parameters() if n != "gaps")
    return errors, strides, digest(gradients(model).values())


@pytest.mark.parametrize("algorithm", ["auto", "reference"])
@pytest.mark.parametrize("plain", [False, True])
def test_tied_strided_and_empty_parameters_and_nested_outputs(monkeypatch, algorithm, plain):
    monkeypatch.setenv("PARALLELKIT_ALGORITHM", algorithm)
    found = run_ranks(awkward, 2, 1e-4, plain)
    for errors, strides, _ in found:
        assert max(errors) <= 2e-6
        assert strides
    assert same([grads for _, _, grads in found])


def several_forwards(group):
    model, batches = pk.DataParallel(mlp(), group), items([2, 3, 4, 5])
    first, second = batches[group.rank :: 2]
    loss = mean_square(model, first[0]) * first[1] + mean_square(model, second[0]) * second[1]
    n = first[1] + second[1]
    model.backward(loss / n, n)
    return worst(gradients(model), one_process(model.module, batches))


def test_several_forward_passes_before_one_backward():
    assert max(run_ranks(several_forwards, 2)) <= CLOSE


def wide_gradients(group):
    """bf16 gradients of 1 and many of 2^-9, which bf16 drops when it adds them one by one."""
    found = {}
    for grad_dtype in (None, torch.float32):
        model = pk.DataParallel(Leaf(5, dtype=torch.bfloat16), group, grad_dtype=grad_dtype)
        for set_to_none in (True, False):
            model.zero_grad(set_to_none)
            for index in range(257):
                model.backward(model(1.0 if index == 0 else 2.0**-9), 1, sync=index == 256)
        found[grad_dtype] = model.p.grad.dtype, (model.p.grad.float() * 257).unique().tolist()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
    return found


def test_grad_dtype_float32_sums_bf16_gradients_in_fp32_and_rounds_once():
    for found in run_ranks(wide_gradients, 2):
        dtype, [value] = found[torch.float32]
        assert dtype == torch.bfloat16
        assert value == pytest.approx(1.5, rel=2**-8)
        assert found[None][1][0] < 1.3  # what it is for


def autocast(group):
    model, batches = pk.DataParallel(mlp(), group), items([3, 4])

    def loss_of(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m(x.float()).float().square().mean()

    accumulate(model, [batches[group.rank]], loss_of)
    expected = dict.fromkeys(gradients(model), 0.0)
    for batch, n in batches:  # the factor outside: bf16 inside would round it
        plain = copy.deepcopy(model.module)
        plain.zero_grad()
        loss_of(plain, batch).backward()
        for name, gradient in gradients(plain).items():
            expected[name] += gradient.double() * (n / 7)
    return worst(gradients(model), expected)


def test_autocast_bf16_gives_the_gradients_of_autocast_in_one_process():
    assert max(run_ranks(autocast, 2)) <= 2e-6


def compiled(group, backends):
    errors = {}
    for backend, outside in backends:
        torch.compiler.reset()
        if outside:
            model = pk.DataParallel(mlp(), group)
            runner = torch.compile(model, backend=backend)
        else:
            runner = model = pk.DataParallel(torch.compile(mlp(), backend=backend), group)
        for step in range(2):
            model.zero_grad()
            batches = items([3] * group.size, seed=step)
            out = runner(batches[group.rank][0].float())
            model.backward(out.square().sum(-1).mean(), 3)
            found = {n.removeprefix("_orig_mod."): g for n, g in gradients(model).items()}
            errors[backend, outside, step] = worst(found, one_process(mlp(), batches))
    return errors


def test_torch_compile_of_the_module_or_of_the_wrapper():
    backends = [(backend, outside) for backend in ("eager", "aot_eager") for outside in (0, 1)]
    for errors in run_ranks(compiled, 2, backends):
        assert max(errors.values()) <= CLOSE, errors


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_torch_compile_with_inductor():
    for errors in run_ranks(compiled, 1, [("inductor", 0)]):  # one process: it takes long
        assert max(errors.values()) <= CLOSE, errors


def batch_norm(group, broadcast_buffers):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    alone = copy.deepcopy(module)
    model = pk.DataParallel(module, group, broadcast_buffers=broadcast_buffers)
    for step, working in enumerate([(0, 1), (0, 1), (1,)]):
        model.zero_grad()
        batches = items([3, 4], seed=step)
        accumulate(model, [batches[group.rank]] if group.rank in working else [])
        alone(batches[working[0]][0].float())
    return model.state_dict(), alone.state_dict()


def test_batch_norm_buffers_become_those_of_the_first_rank_that_had_work():
    for found, expected in run_ranks(batch_norm, 2, True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    (mine, _), (theirs, _) = run_ranks(batch_norm, 2, False)
    assert not torch.equal(mine["1.running_mean"], theirs["1.running_mean"])


def plain_backward(group):
    """As DDP: each backward pass counts 1, and the forward inside no_sync decides."""
    model, batches = pk.DataParallel(mlp(), group), items([2] * 6)
    mine, errors = batches[group.rank :: 2], []
    for set_to_none in (True, False, False):
        model.zero_grad(set_to_none)
        with model.no_sync():
            losses = [mean_square(model, x) for x, _ in mine[:2]]
        for loss in losses:
            loss.backward()
        mean_square(model, mine[2][0]).backward()
        errors.append(worst(gradients(model), one_process(model.module, batches)))
    return errors, model.total_weight.item()


@pytest.mark.parametrize("algorithm", ["auto", "reference"])
def test_plain_backward_counts_one_and_no_sync_accumulates(monkeypatch, algorithm):
    monkeypatch.setenv("PARALLELKIT_ALGORITHM", algorithm)
    for errors, total in run_ranks(plain_backward, 2):
        assert max(errors) <= CLOSE
        assert total == 6


class Opaque(nn.Module):
    """Gives an object in which nobody finds the tensor."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return lambda: self.net(x).square().sum(-1).mean()


def opaque_outputs(group):
    model, batches, errors = pk.DataParallel(Opaque(), group), items([3, 3]), []
    for set_to_none in (True, False):
        model.zero_grad(set_to_none)
        model(batches[group.rank][0].float())().backward()
        expected = one_process(mlp(), batches)
        errors.append(worst(gradients(model.module.net), expected))
    with pytest.raises(RuntimeError, match="zero_grad"):
        model(batches[group.rank][0].float())().backward()
    return errors


def test_plain_backward_of_outputs_that_hide_their_tensors():
    for errors in run_ranks(opaque_outputs, 2):
        assert max(errors) <= CLOSE


def gradient_penalty(group):
    """autograd.grad inside a step leaves no gradient, so nothing travels for it."""
    model, batches = pk.DataParallel(mlp(), group), items([3, 3])

    def loss_of(m, x):
        x = x.to(next(m.parameters()).dtype).requires_grad_()
        [slope] = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        return slope.square().sum(-1).mean()

    if group.rank == 0:  # more of them on one rank
        loss_of(model, batches[0][0])
    loss_of(model, batches[group.rank][0]).backward()
    return worst(gradients(model), one_process(model.module, batches, loss_of))


def test_autograd_grad_within_a_step_does_not_sync():
    assert max(run_ranks(gradient_penalty, 2)) <= CLOSE


def face(group):
    module = mlp()
    model = pk.DataParallel(module, group)
    outer = nn.Sequential(model, nn.Linear(3, 2))
    plain = nn.Sequential(mlp(seed=5), nn.Linear(3, 2))
    assert (
        list(model.state_dict())
        == list(module.state_dict())
        == ["0.weight", "0.bias", "2.weight", "2.bias"]
    )
    assert [n for n, _ in model.named_parameters()] == list(module.state_dict())
    assert [n for n, _ in outer.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(outer.state_dict()) == list(plain.state_dict())
    outer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(module.state_dict(), plain[0].state_dict(), rtol=0, atol=0)
    assert model.load_state_dict(mlp(seed=3).state_dict()).missing_keys == []
    assert digest(module.parameters()) == digest(mlp(seed=3).parameters())
    module.note = "hello"
    assert model.note == "hello" and model.module is module
    with pytest.raises(AttributeError, match="no_such_thing"):
        model.no_such_thing  # noqa: B018
    model.eval()
    assert not module[0].training
    del outer, model
    assert not module[0].weight._post_accumulate_grad_hooks
    return True


def test_names_state_dict_and_attributes_are_the_modules_own():
    assert run_ranks(face, 1) == [True]


def memory(group):
    """The gradients lie in the buckets, and nowhere else; the same place every step."""
    model = pk.DataParallel(mlp(), group)
    places = []
    for _ in range(3):
        model.zero_grad()
        accumulate(model, items([3]))
        places.append([p.grad.data_ptr() for p in model.parameters()])
        assert all(place % 64 == 0 for place in places[-1])
        assert all(p.grad.untyped_storage().nbytes() >= 59 * 4 for p in model.parameters())
    return same(places)


def test_gradients_are_views_of_buckets_that_stay():
    assert run_ranks(memory, 2) == [True, True]


def overlapped(group):
    """From the second sync on, buckets leave while autograd still runs."""
    torch.manual_seed(0)
    module, seen = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), []
    model = pk.DataParallel(module, group, bucket_mb=0.02)
    module[0].weight.register_hook(lambda _: seen.append(len(model._sync._pass.works)))
    for step in range(3):
        model.zero_grad()
        batches = items([3, 4], seed=step, inputs=64)
        accumulate(model, [batches[group.rank]])
        assert worst(gradients(model), one_process(module, batches)) <= 2e-6
    return seen


def test_buckets_travel_while_backward_runs():
    for first, second, third in run_ranks(overlapped, 2):
        assert first == 0
        assert second == third >= 4


def test_losses_that_are_nan_on_a_working_rank_reach_everybody():
    assert all(math.isnan(v) for [v] in run_ranks(nan_everywhere, 2))


def nan_everywhere(group):
    model = pk.DataParallel(Leaf(1), group)
    model.backward(model([math.nan, 1.0][group.rank]), 1)
    return model.p.grad.tolist()


def sparse(group):
    module = nn.Embedding(7, 3, sparse=True)
    nn.init.ones_(module.weight)
    model = pk.DataParallel(module, group)
    index = [torch.tensor([1, 2]), torch.tensor([2, 2, 6])][group.rank]
    model.backward(F.embedding(index, module.weight, sparse=True).sum(-1).mean(), len(index))
    return model.weight.grad.tolist()


def test_sparse_gradients_become_dense_means():
    expected = [[n / 5] * 3 for n in (0, 1, 3, 0, 0, 0, 1)]
    for found in run_ranks(sparse, 2):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
