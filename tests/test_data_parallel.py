"""Gradients are means over all items of all ranks, however split into micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import NATIVE, digest, same
from torch import nn
from training import Leaf, accumulate, gradients, items, mean_square, mlp, one_process, worst

import parallelkit as pk
from parallelkit.testing import run_ranks
from parallelkit.transport import choose

CLOSE = 1e-6  # fp32, relative to the largest gradient of a tensor


@pytest.fixture
def algorithm(request, monkeypatch):
    monkeypatch.setenv("PARALLELKIT_ALGORITHM", request.param)


def with_algorithms(test):
    return pytest.mark.parametrize("algorithm", ["auto", "reference"], indirect=True)(test)


# Case 1: https://github.com/pytorch/pytorch/issues/31579
def means_of_leaves(group):
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for numel in (0, 1, 3, 7, 1023):
            model = pk.DataParallel(Leaf(numel, dtype=dtype), group)
            model.backward(model([1.0, 5.0][group.rank]), [1, 3][group.rank])
            assert model.p.grad.shape == (numel,) and model.p.grad.dtype == dtype
            found.append(bool((model.p.grad == 4.0).all()) and model.total_weight.item() == 4)
    return found


@with_algorithms
def test_each_item_counts_once_not_each_rank(algorithm):
    for found in run_ranks(means_of_leaves, 2):
        assert found == [True] * 20


# Case 3: https://github.com/allenai/OLMo-core/pull/657
def nan_of_weight_zero(group):
    model = pk.DataParallel(Leaf(3), group)
    model.backward(model([math.nan, 2.0][group.rank]), [0, 4][group.rank])
    one = model.p.grad.tolist(), model.total_weight.item()
    model.zero_grad()
    model.backward(model(math.nan), 0)
    return one, model.p.grad, model.total_weight.item()


@with_algorithms
def test_a_rank_of_weight_0_spreads_no_nan_and_nobody_at_all_gives_none(algorithm):
    assert run_ranks(nan_of_weight_zero, 2) == [(([2.0] * 3, 4.0), None, 0.0)] * 2


# Case 4: https://github.com/pytorch/torchtitan/pull/2323
def eight_micro_batches(group, dtype):
    model, batches = pk.DataParallel(mlp(dtype=dtype), group), items([2] * 8)
    accumulate(model, batches[group.rank :: group.size])
    return gradients(model), one_process(model.module, batches)


@with_algorithms
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, CLOSE), (torch.float64, 1e-14)])
def test_gradients_of_4_ranks_times_2_micro_batches_are_those_of_one_process(
    algorithm, dtype, bound
):
    for found, expected in run_ranks(eight_micro_batches, 4, dtype):
        assert worst(found, expected) <= bound


def over_two_hosts(group):
    choose.host_identity = lambda: ("ab"[group.rank // 2], "", 0)
    with pk.Group() as hosts:
        return hosts.transport, worst(*eight_micro_batches(hosts, torch.float32))


@pytest.mark.skipif(not NATIVE, reason="needs the native extension")
def test_ranks_of_several_hosts_give_the_same_gradients():
    for transport, error in run_ranks(over_two_hosts, 4):
        assert transport == "hierarchical"
        assert error <= CLOSE


# Case 5: https://github.com/pytorch/pytorch/issues/33148
def uneven_batches(group):
    model, batches = pk.DataParallel(mlp(), group), items([3, 2, 5, 4, 1, 2, 6, 3])
    shares = [batches[:3], batches[3:]]
    errors = []
    for step in range(5):
        model.zero_grad()
        now = [share[step] for share in shares if step < len(share)]
        accumulate(model, shares[group.rank][step : step + 1])
        errors.append(worst(gradients(model), one_process(model.module, now)))
    return errors, digest(p.grad for p in model.parameters())


def test_a_rank_that_ran_out_of_batches_takes_part_with_weight_0():
    (errors, _), (others, _) = found = run_ranks(uneven_batches, 2)
    assert max(errors + others) <= CLOSE
    assert same([grads for _, grads in found])


# Case 6: https://github.com/karpathy/build-nanogpt/pull/30
def micro_batches_of_different_number(group):
    model, batches = pk.DataParallel(mlp(), group), items([1, 4, 2, 7, 3])
    mine = batches[:4] if group.rank == 0 else batches[4:]
    for batch, weight in mine[:-1]:
        model.backward(mean_square(model, batch), weight, sync=False)
    before = model.total_weight.item()  # nothing has travelled yet
    model.backward(mean_square(model, mine[-1][0]), mine[-1][1])
    return before, worst(gradients(model), one_process(model.module, batches)), gradients(model)


@with_algorithms
def test_4_micro_batches_against_1_sync_at_the_last_only(algorithm):
    found = run_ranks(micro_batches_of_different_number, 2)
    for before, error, _ in found:
        assert before == 0
        assert error <= CLOSE
    assert same([digest(grads.values()) for _, _, grads in found])


# Case 7: https://github.com/huggingface/accelerate/issues/3877
def train_with_split(group, parts, stage):
    model = pk.DataParallel(mlp(), group)
    if stage == 0:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        fused = model if stage == 2 else None
        optimizer = pk.ShardedAdamW(model.parameters(), lr=1e-2, group=group, data_parallel=fused)
    for step in range(5):
        optimizer.zero_grad()
        mine = items([16], seed=step)[0][0].chunk(group.size)[group.rank].chunk(parts)
        accumulate(model, [(x, len(x)) for x in mine])
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train_all(group):
    runs = [(1, 0), (2, 1), (4, 2), (8, 0), (8, 1), (1, 2)]  # (micro-batches, stage)
    return [train_with_split(group, *run) for run in runs]


def test_weights_do_not_depend_on_the_number_of_micro_batches_nor_on_the_stage():
    for first, *others in run_ranks(train_all, 2):
        for other in others:
            torch.testing.assert_close(other, first, rtol=2e-5, atol=2e-6)


# Case 8: https://github.com/huggingface/transformers/issues/37474
def weights_of_every_kind(group):
    model, found = pk.DataParallel(Leaf(2), group), []
    for one, three in [
        (1, 3),
        (1.0, 3.0),
        (torch.tensor(1), torch.tensor(3)),
        (torch.tensor(0.5, dtype=torch.float16), torch.tensor(1.5, dtype=torch.float64)),
        (2**40, 3 * 2**40),
    ]:
        model.zero_grad()
        model.backward(model([1.0, 5.0][group.rank]), [one, three][group.rank])
        found.append(model.p.grad.tolist())
    return found


def test_a_weight_is_an_int_a_float_or_a_0_dim_tensor():
    assert run_ranks(weights_of_every_kind, 2) == [[[4.0, 4.0]] * 5] * 2


# Case 9: https://github.com/huggingface/transformers/issues/16716
def epoch_of_seven(group):
    model, samples = pk.DataParallel(mlp(), group), items([7])[0][0]
    first, last = samples[:4].chunk(2), samples[4:].chunk(2)  # 2 + 2, then 2 + 1
    accumulate(model, [(x, len(x)) for x in (first[group.rank], last[group.rank])])
    return worst(gradients(model), one_process(model.module, [(samples, 7)]))


def test_a_short_last_batch_counts_by_its_samples():
    assert max(run_ranks(epoch_of_seven, 2)) <= CLOSE


# Case 10: https://github.com/NVIDIA/Megatron-LM/issues/673
def tokens_over_dp_only(group):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pk.Group.from_mesh(mesh["dp"]) as over_dp:
        model = pk.DataParallel(Leaf(3), over_dp)
        model.backward(model([1.0, 5.0][over_dp.rank]), [1, 3][over_dp.rank])
        found = over_dp.size, model.p.grad.tolist(), model.total_weight.item()
    again = pk.DataParallel(Leaf(3), mesh["dp"])  # the mesh stands for its group
    again.backward(again([1.0, 5.0][again.group.rank]), [1, 3][again.group.rank])
    assert torch.equal(again.p.grad, model.p.grad)
    return found


def test_on_a_mesh_tokens_count_over_dp_only():
    assert run_ranks(tokens_over_dp_only, 4) == [(2, [4.0] * 3, 4.0)] * 4


# Case 11: https://github.com/huggingface/trl/pull/6478
def sums_and_means(group):
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model, batches = pk.DataParallel(mlp(dtype=dtype), group), items([1, 4, 2, 7, 3, 3])
        expected = one_process(model.module, batches)
        for kinds in ("sum", "sum"), ("mean", "sum"), ("sum", "mean"):
            model.zero_grad()
            mine = batches[group.rank :: group.size]
            for index, (batch, n) in enumerate(mine):
                loss = mean_square(model, batch)
                kind = kinds[index % 2]
                loss = loss * n if kind == "sum" else loss
                model.backward(loss, n, reduction=kind, sync=index == len(mine) - 1)
            found.append((dtype, worst(gradients(model), expected)))
    return found


def test_a_loss_may_be_a_mean_or_a_sum_and_the_two_may_mix():
    for found in run_ranks(sums_and_means, 2):
        for dtype, error in found:
            assert error <= (CLOSE if dtype == torch.float32 else 0.05)


# Case 12: https://github.com/pytorch/pytorch/issues/28294
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(n)) for n in (3, 5, 1)])

    def forward(self, used):
        return sum((self.parts[i] * g).sum() for i, g in used)


def unused_parameters(group):
    model = pk.DataParallel(Branches(), group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    # On rank 0 the first two are used, on rank 1 the first; the next step the other way round.
    found = []
    for step in range(3):
        optimizer.zero_grad()
        rank = (group.rank + step) % 2
        model.backward(model([(0, 2.0), (1, 4.0)] if rank == 0 else [(0, 2.0)]), 2)
        found.append([None if p.grad is None else p.grad.unique().tolist() for p in model.parts])
        optimizer.step()
    return found, model.parts[2].tolist(), digest(model.parameters())


@with_algorithms
def test_unused_everywhere_stays_untouched_and_used_somewhere_counts_zeros_elsewhere(algorithm):
    found = run_ranks(unused_parameters, 2)
    for grads, untouched, _ in found:
        assert grads == [[[2.0], [2.0], None]] * 3
        assert untouched == [1.0]
    assert same([weights for _, _, weights in found])


# Case 15: https://github.com/pytorch/pytorch/issues/158753
def complex_gradients(group):
    model = pk.DataParallel(Leaf(5, dtype=torch.complex64), group)
    gradient = [1 - 2j, 3 - 6j][group.rank]  # autograd gives its conjugate
    model.backward(model(torch.full((5,), gradient)).real, [1, 3][group.rank])
    return model.p.grad.tolist()


@with_algorithms
def test_complex_gradients_keep_their_imaginary_part(algorithm):
    assert run_ranks(complex_gradients, 2) == [[2.5 + 5j] * 5] * 2


# Case 30: https://github.com/pytorch/torchtitan/issues/166
class Buffers(nn.Module):
    def __init__(self, rank):
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        special = torch.tensor([-0.0, 0.0, math.inf, 1e-45, math.nan])
        self.special = nn.Parameter(special if rank == 0 else torch.randn(5, generator=generator))
        self.bf16 = nn.Parameter(torch.randn(7, generator=generator).bfloat16())
        self.pairs = nn.Parameter(torch.randn(3, 2, generator=generator, dtype=torch.cfloat))
        self.transposed = nn.Parameter(torch.randn(4, 3, generator=generator).t())
        self.register_buffer("counts", torch.randint(-(2**62), 2**62, (9,), generator=generator))
        self.register_buffer("flags", torch.rand(4, generator=generator) < 0.5)
        self.register_buffer("mean", torch.randn((), generator=generator, dtype=torch.float64))
        self.register_buffer("same", self.mean, persistent=False)


def construct(group):
    module, first = Buffers(group.rank), Buffers(0)
    pk.DataParallel(module, group)
    found, expected = [[*m.parameters(), *m.buffers()] for m in (module, first)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    # Plain torch.distributed adds the zeros of the other ranks, which loses the sign of -0.0.
    assert group.transport == "process-group" or digest(found) == digest(expected)
    return digest(found)


@with_algorithms
def test_construction_gives_every_rank_the_values_of_rank_0(algorithm):
    assert same(run_ranks(construct, 3))


def counts_that_do_not_fit(group):
    """Weights far beyond what the dtype of the gradients holds."""
    found = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        model = pk.DataParallel(Leaf(9, dtype=dtype), group)
        model.backward(model(60000.0), 4096)
        found[f"{dtype} one"] = model.p.grad.unique().tolist(), 60000.0
        model.zero_grad()
        for sync in (False, False, False, False, True):  # a plain sum of two would overflow fp16
            model.backward(model(60000.0), 4096, sync=sync)
        found[f"{dtype} five"] = model.p.grad.unique().tolist(), 60000.0
        model.zero_grad()
        model.backward(model(60000.0) * 16, 16, reduction="sum", sync=False)
        model.backward(model(60000.0) * 16, 16, reduction="sum")
        found[f"{dtype} sums"] = model.p.grad.unique().tolist(), 60000.0
        for order in ((1, 2**40), (2**40, 1)):
            model.zero_grad()
            for n in order:
                model.backward(model(60000.0 if n > 1 else -60000.0), n, sync=n == order[-1])
            found[f"{dtype} {order}"] = model.p.grad.unique().tolist(), 60000.0
        model.zero_grad()
        model.backward(model([3.0, 60000.0][group.rank]), [1, 2**40][group.rank])
        found[f"{dtype} ranks"] = model.p.grad.unique().tolist(), 60000.0
    return found


def test_no_count_overflows_a_gradient_or_costs_it_digits():
    for found in run_ranks(counts_that_do_not_fit, 2):
        for what, ([value], expected) in found.items():
            dtype = torch.bfloat16 if "bfloat16" in what else torch.float32
            assert value == torch.tensor(expected, dtype=dtype).item(), what


def low_precision_losses(group):
    """The loss itself is bf16: a factor of 3/7 would lose 8 bits in it."""
    model = pk.DataParallel(Leaf(4), group)
    for n, sync in ((11, False), (3, False), (7, True)):
        model.backward(model(float(n)).bfloat16(), n, sync=sync)
    return model.p.grad.unique().tolist()


def test_a_bf16_loss_does_not_round_the_weights():
    expected = (9 + 49 + 121) / 21
    for [found] in run_ranks(low_precision_losses, 1):
        assert found == pytest.approx(expected, rel=3e-7)


def zeros_still_count(group):
    model = pk.DataParallel(Leaf(4), group)
    model.backward(model(0.0), 3, sync=False)  # its gradient is zero, its weight is not
    model.backward(model(4.0), 1)
    one = model.p.grad.unique().tolist()
    model.zero_grad()
    model.backward(model(8.0), 5, sync=False)
    model.zero_grad(set_to_none=[True, False][group.rank])  # thrown away
    model.backward(model(4.0), 1)
    return one, model.p.grad.unique().tolist(), model.total_weight.item()


def test_a_zero_gradient_has_its_weight_but_what_zero_grad_threw_away_has_none():
    assert run_ranks(zeros_still_count, 2) == [([1.0], [4.0], 2.0)] * 2
