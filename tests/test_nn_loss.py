"""The split cross entropy against torch's own of the whole logits in float64."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from ranks import message_of

import parallelkit as pk

loss = pk.nn.functional.vocab_parallel_cross_entropy


def case(seed, classes, shape):
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn((*shape, classes), generator=generator, dtype=torch.float64)
    target = torch.randint(0, classes, shape, generator=generator)
    return logits, target


def shard(x, group):
    start, stop = pk.shard_bounds(x.shape[-1], group.size, group.rank)
    return x[..., start:stop]


def as_one(logits, target, **options):
    """torch's function, classes last."""
    flat = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), **options)
    return flat.view(target.shape) if options["reduction"] == "none" else flat


CASES = list(itertools.product([(5, (4,)), (7, (2, 3)), (2, (6,)), (50, ())], [0.0, 0.1, 1.0]))


def compare(group, dtype):
    """(case, difference of the loss, difference of its gradient); NaN equals NaN."""
    found = []
    for ((classes, shape), smoothing), reduction, ignored in itertools.product(
        CASES, ("mean", "sum", "none"), ("none", "some", "all")
    ):
        logits, target = case(classes, classes, shape)
        logits = logits.to(dtype)
        if ignored != "none":
            keep = torch.zeros_like(target, dtype=torch.bool)
            if ignored == "some" and target.ndim:
                keep[1:] = True
            target = torch.where(keep, target, 1)
            target = torch.where(keep, target, -100)
        options = {"reduction": reduction, "label_smoothing": smoothing}
        exact = logits.double().clone().requires_grad_()
        wanted = as_one(exact, target, **options)
        mine = shard(logits, group).clone().requires_grad_()
        y = loss(mine, target, group=group, **options)
        weight = torch.arange(1.0, 1.0 + y.numel(), dtype=torch.float64).view(y.shape)
        (wanted * weight).sum().backward()
        (y * weight).sum().backward()
        pairs = [(y.detach(), wanted.detach()), (mine.grad, shard(exact.grad, group))]
        differences = []
        for got, want in pairs:
            same_nan = torch.equal(got.isnan(), want.isnan())
            difference = (got.double() - want).nan_to_num(0.0).abs()
            scale = want.nan_to_num(0.0).abs().max() if want.numel() else 1.0
            largest = difference.max() / max(1.0, float(scale)) if want.numel() else 0.0
            differences.append(float(largest) if same_nan else math.inf)
        found.append(((classes, shape, smoothing, reduction, ignored), *differences))
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_loss_and_gradient_equal_torchs(size):
    for results in pk.testing.run_ranks(compare, size, torch.float64):
        for what, value, gradient in results:
            assert value < 1e-12, what
            assert gradient < 1e-12, what


def test_bfloat16_logits_lose_only_the_last_rounding():
    for results in pk.testing.run_ranks(compare, 2, torch.bfloat16):
        for what, value, gradient in results:
            assert value < 2**-8, what
            assert gradient < 2**-8, what


def extremes(group):
    """Large logits, a rank of minus infinities only, another ignore_index."""
    logits = torch.full((3, 6), 1e4, dtype=torch.float64)
    logits[1, :3] = -math.inf
    logits[2] = torch.tensor([0.0, -2e4, 3e4, 1.0, 2e4, 3e4])
    target = torch.tensor([5, 4, 2])
    y = loss(shard(logits, group), target, group=group, reduction="none")
    other = loss(shard(logits, group), target, group=group, ignore_index=5, reduction="none")
    return y.tolist(), other.tolist()


def test_no_overflow_and_no_nan_from_minus_infinity():
    logits_loss = [math.log(6), math.log(3), math.log(2)]
    for y, other in pk.testing.run_ranks(extremes, 2):
        assert y == pytest.approx(logits_loss, abs=1e-10)
        assert other == pytest.approx([0.0, *logits_loss[1:]], abs=1e-10)


def not_a_number(group):
    """The loss and the gradient where an ignored token has NaN logits."""
    logits = torch.zeros(2, 6, dtype=torch.float64)
    logits[1] = math.nan
    mine = shard(logits, group).clone().requires_grad_()
    y = loss(mine, torch.tensor([0, -100]), group=group)
    y.backward()
    return y.item(), mine.grad[1].tolist()


def test_the_values_of_ignored_tokens_reach_nobody():
    for y, gradient in pk.testing.run_ranks(not_a_number, 2):
        assert y == pytest.approx(math.log(6))
        assert gradient == [0.0] * 3


def equal_bits(group):
    logits, target = case(3, 1000, (64,))
    y = loss(shard(logits.float(), group), target, group=group)
    return y.numpy().tobytes()


def test_the_loss_is_the_same_on_every_rank_to_the_bit():
    assert len(set(pk.testing.run_ranks(equal_bits, 4))) == 1


def traffic(group):
    """Bytes of what travels for 100 tokens of 4000 classes."""
    moved = []
    gather = pk.nn.exchange.all_gather
    pk.nn.exchange.all_gather = lambda x, *rest: (moved.append(x.nbytes), gather(x, *rest))[1]
    logits, target = case(1, 4000, (100,))
    mine = shard(logits.float(), group).clone().requires_grad_()
    loss(mine, target, group=group).backward()
    return moved


def test_four_numbers_a_token_travel_and_no_logits():
    assert pk.testing.run_ranks(traffic, 2) == [[4 * 4 * 100]] * 2


def refused(group):
    messages = []
    logits, target = torch.randn(2, 3), torch.tensor([0, 1])
    for call in (
        lambda: loss(logits, target[:1], group=group),
        lambda: loss(logits, target.float(), group=group),
        lambda: loss(logits, torch.tensor([0, 6]), group=group),
        lambda: loss(logits, torch.tensor([0, -1]), group=group),
        lambda: loss(logits, target, group=group, reduction="max"),
        lambda: loss(logits, target, group=group, label_smoothing=1.5),
    ):
        try:
            call()
        except (ValueError, TypeError) as error:
            messages.append(str(error))
    return messages


def test_wrong_arguments_are_named():
    for messages in pk.testing.run_ranks(refused, 2):
        parts = ["target [...]", "int64", "[0, 6)", "[0, 6)", '"mean", "sum"', "in [0, 1]"]
        assert len(messages) == len(parts)
        for message, part in zip(messages, parts, strict=True):
            assert part in message


def compiled(group):
    """One graph: right where the shards are of one length, refused where they are not."""
    run = torch.compile(
        lambda x, target: loss(x, target, group=group), backend="aot_eager", fullgraph=True
    )
    logits, target = case(3, 8, (2, 5))
    exact, mine = logits.clone().requires_grad_(), shard(logits, group).clone().requires_grad_()
    wanted = as_one(exact, target, reduction="mean")
    y = run(mine, target)
    wanted.backward()
    y.backward()
    difference = max(
        float((y - wanted).detach().abs()),
        float((mine.grad - shard(exact.grad, group)).abs().max()),
    )
    logits, target = case(3, 7, (2, 5))
    told = message_of(pk.CollectiveMismatchError, lambda: run(shard(logits, group), target))
    total = pk.nn.functional.reduce_from_group(torch.ones(1), group)
    return difference, told, total.item()


def test_a_compiled_loss_is_right_or_refused():
    for difference, told, total in pk.testing.run_ranks(compiled, 2):
        assert difference < 1e-12
        assert "8 long on rank 0; 6 long on rank 1" in told
        assert total == 2.0
