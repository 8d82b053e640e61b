"""What cannot go well raises, on every rank, and the next step works."""

from __future__ import annotations

import copy
import math
import pickle
import time
from datetime import timedelta

import pytest
import torch
from ranks import message_of, same
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Leaf, accumulate, gradients, items, mean_square, mlp, one_process, worst

import parallelkit as pk
from parallelkit.testing import run_ranks

CLOSE = 1e-6


def next_step_works(model, group):
    model.zero_grad()
    batches = items([3, 4, 2], seed=9)[: group.size]
    accumulate(model, [batches[group.rank]])
    return worst(gradients(model), one_process(model.module, batches)) <= CLOSE


CLEARS = {
    "model none": lambda m, o: m.zero_grad(),
    "model zeros": lambda m, o: m.zero_grad(set_to_none=False),
    "optimizer none": lambda m, o: o.zero_grad(),
    "optimizer zeros": lambda m, o: o.zero_grad(set_to_none=False),
    "module none": lambda m, o: m.module.zero_grad(),
    "by hand": lambda m, o: [p.grad.data.zero_() for p in m.parameters()],
}
DOES_NOT_CLEAR = {
    "nothing": lambda m, o: None,
    "part": lambda m, o: m.module[2].zero_grad(),
    "scaled": lambda m, o: [p.grad.mul_(2) for p in m.parameters()],
}


def second_synced(group, plain):
    found = {}
    for what, clear in (CLEARS | DOES_NOT_CLEAR).items():
        model = pk.DataParallel(mlp(), group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        batches = items([3, 3])

        def step(model=model, batches=batches):
            if plain:
                mean_square(model, batches[group.rank][0]).backward()
            else:
                accumulate(model, [batches[group.rank]])

        step()
        optimizer.step()
        before = gradients(model)
        clear(model, optimizer)
        if what in CLEARS:
            step()
            found[what] = worst(gradients(model), before) <= CLOSE
        else:
            text = message_of(RuntimeError, step)
            assert "zero_grad()" in text and f"[rank {group.rank} of 2]" in text
            found[what] = next_step_works(model, group)
    return found


@pytest.mark.parametrize("plain", [False, True], ids=["weighted", "plain"])
def test_a_second_synced_backward_needs_cleared_gradients(plain):
    for found in run_ranks(second_synced, 2, plain):
        assert found == dict.fromkeys(CLEARS | DOES_NOT_CLEAR, True)


def accumulate_on_a_mean(group):
    """sync=False on top of a mean is no sync yet; only the next sync would be wrong."""
    model = pk.DataParallel(Leaf(3), group)
    model.backward(model(1.0), 1)
    model.backward(model(1.0), 1, sync=False)
    message_of(RuntimeError, lambda: model.backward(model(1.0), 1))
    model.zero_grad()
    model.backward(model(3.0), 1, sync=False)
    model.backward(model(5.0), 1)
    return model.p.grad.tolist()


def test_accumulating_on_a_mean_does_not_hide_it():
    assert run_ranks(accumulate_on_a_mean, 2) == [[4.0] * 3] * 2


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("boom")


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])
        self.explode = False

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1 and self.explode:
                x = Explode.apply(x)
        return x


def exception_in_backward(group, culprits, plain, at_step):
    torch.manual_seed(0)
    model = pk.DataParallel(Fragile(), group, bucket_mb=1e-4)
    for step in range(at_step):
        assert next_step_works(model, group), step
    model.zero_grad()
    model.module.explode = group.rank in culprits
    loss = mean_square(model, items([3])[0][0])
    told = ""
    try:
        loss.backward() if plain else model.backward(loss, 3)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    model.module.explode = False
    if plain and group.rank in culprits:
        assert "boom" in told
        told = "found at the next use"
        assert next_step_works(model, group)
        return told, True
    return told, next_step_works(model, group)


@pytest.mark.parametrize("at_step", [0, 2], ids=["first", "overlapping"])
@pytest.mark.parametrize("culprits", [(1,), (0, 1)], ids=["one", "all"])
def test_an_exception_in_backward_raises_everywhere_and_the_next_step_works(culprits, at_step):
    for rank, (told, works) in enumerate(
        run_ranks(exception_in_backward, 2, culprits, False, at_step)
    ):
        assert told.startswith("ZeroDivisionError" if rank in culprits else "UsageError")
        assert "boom" in told
        assert rank in culprits or "[rank 1 of 2]" in told
        assert works


@pytest.mark.parametrize("at_step", [0, 2], ids=["first", "overlapping"])
def test_after_an_exception_in_a_plain_backward_the_others_hear_at_its_next_use(at_step):
    (told, works), (_, culprit_works) = run_ranks(exception_in_backward, 2, (1,), True, at_step)
    assert "did not come to its end" in told and "[rank 1 of 2]" in told
    assert works and culprit_works


class Late(nn.Module):
    """Its head is used last, and once more inside a checkpoint of which autograd learns later."""

    def __init__(self):
        super().__init__()
        self.stem, self.head, self.reentrant = nn.Linear(5, 5), nn.Linear(5, 5), False

    def forward(self, x):
        x = self.stem(x)
        x = checkpoint(self.head, x, use_reentrant=True) if self.reentrant else self.head(x)
        return self.head(torch.tanh(x))


def checkpointing_that_begins_late(group):
    model = pk.DataParallel(Late(), group, bucket_mb=1e-4)
    assert next_step_works(model, group) and next_step_works(model, group)
    model.module.reentrant = True
    model.zero_grad()
    batch, n = items([3])[0]
    text = message_of(RuntimeError, lambda: model.backward(mean_square(model, batch), n))
    return text, next_step_works(model, group)


def test_a_gradient_that_comes_after_its_bucket_left_is_refused_and_overlap_ends():
    for text, works in run_ranks(checkpointing_that_begins_late, 2):
        assert "head." in text and "reentrant" in text
        assert works


def exception_while_accumulating(group):
    model = pk.DataParallel(Fragile(), group)
    batches = items([3, 5, 2])
    model.backward(mean_square(model, batches[0][0]), 3, sync=False)
    model.module.explode = True
    with pytest.raises(ZeroDivisionError):
        model.backward(mean_square(model, batches[1][0]), 5, sync=False)
    model.module.explode = False
    assert all(
        p.grad is None for p in model.parameters()
    )  # a half-added micro-batch is worth nothing
    model.backward(mean_square(model, batches[2][0]), 2)
    return worst(gradients(model), one_process(model.module, batches[2:]))


def test_a_failed_micro_batch_drops_what_was_accumulated():
    assert max(run_ranks(exception_while_accumulating, 2)) <= CLOSE


BAD_ARGUMENTS = {
    "negative weight": (ValueError, lambda m: m.backward(m(1.0), -2), "-2.0"),
    "infinite weight": (ValueError, lambda m: m.backward(m(1.0), float("inf")), "inf"),
    "nan weight": (ValueError, lambda m: m.backward(m(1.0), torch.tensor(float("nan"))), "nan"),
    "huge weight": (ValueError, lambda m: m.backward(m(1.0), 10**400), "inf"),
    "text weight": (TypeError, lambda m: m.backward(m(1.0), "3"), "str"),
    "vector weight": (TypeError, lambda m: m.backward(m(1.0), torch.ones(2)), "[2]"),
    "no loss": (ValueError, lambda m: m.backward(None, 3), "weight=0"),
    "vector loss": (ValueError, lambda m: m.backward(m.p * 2, 3), "[3]"),
    "detached vector": (ValueError, lambda m: m.backward((m.p * 2).detach(), 3), "[3]"),
    "number loss": (TypeError, lambda m: m.backward(1.5, 3), "float"),
    "detached loss": (RuntimeError, lambda m: m.backward(m(1.0).detach(), 3), "grad"),
    "reduction": (ValueError, lambda m: m.backward(m(1.0), 1, reduction="avg"), "'avg'"),
}


def step_to_four(group, model):
    model.zero_grad()
    model.backward(model([1.0, 5.0][group.rank]), [1, 3][group.rank])
    return model.p.grad.tolist() == [4.0] * 3


def bad_arguments(group):
    """On rank 1 alone."""
    found = {}
    for what, (kind, call, part) in BAD_ARGUMENTS.items():
        model = pk.DataParallel(Leaf(3), group)
        with pytest.raises(kind) as caught:
            call(model) if group.rank == 1 else model.backward(model(1.0), 1)
        assert part in str(caught.value), what
        assert str(caught.value).count("[rank 1 of 2]") == 1, what
        found[what] = step_to_four(group, model)
    return found


def test_a_bad_argument_on_one_rank_raises_on_all_and_the_next_step_works():
    assert run_ranks(bad_arguments, 2) == [dict.fromkeys(BAD_ARGUMENTS, True)] * 2


def bad_argument_without_sync(group):
    model = pk.DataParallel(Leaf(3), group)
    if group.rank == 1:
        with model.no_sync(), pytest.raises(ValueError, match="-2.0"):
            model.backward(model(1.0), -2)
    return step_to_four(group, model)


def test_a_bad_argument_without_sync_raises_here_only():
    assert run_ranks(bad_argument_without_sync, 2) == [True, True]


def moved(group):
    model = pk.DataParallel(mlp(), group)
    assert next_step_works(model, group)
    model.to("cpu")
    model.to(memory_format=torch.channels_last)
    assert next_step_works(model, group)
    model.to(torch.bfloat16)
    x = torch.ones(2, 5, dtype=torch.bfloat16)
    texts = [
        message_of(RuntimeError, lambda: model(x)),
        message_of(RuntimeError, lambda: model.backward(None, weight=0)),
    ]
    assert all(f"2.bias was {torch.float32}" in t and str(torch.bfloat16) in t for t in texts)
    return True


def test_moving_or_casting_a_wrapped_module_raises_at_its_next_use():
    assert run_ranks(moved, 2) == [True, True]


def moved_on_one_rank(group, plain, cast):
    """The others are in their synced backward by the time rank 1 notices, in its forward pass."""
    group.close()
    with pk.Group(timeout=timedelta(seconds=20)) as group:
        model = pk.DataParallel(mlp(), group)
        assert next_step_works(model, group)
        model.zero_grad(set_to_none=cast == "for now")
        state = copy.deepcopy(model.state_dict())

        def step():
            loss = model(torch.ones(2, 5)).sum()
            loss.backward() if plain else model.backward(loss, 2)

        if group.rank == 1:
            model.to(torch.bfloat16)
        if cast == "and back":
            model.to(torch.float32).load_state_dict(state)  # which had been rounded
        text = message_of(RuntimeError, step)
        model.to(torch.float32).load_state_dict(state)
        again = message_of(RuntimeError, step) if cast == "and back" else ""
        if cast == "and back":
            model = pk.DataParallel(model.module, group)
        assert next_step_works(model, group)
        if group.rank == 1:  # no backward follows, so nobody is told
            model.to(torch.bfloat16)
            with torch.no_grad():
                message_of(RuntimeError, lambda: model(torch.ones(2, 5)))
    return text, again


@pytest.mark.parametrize("cast", ["for now", "and back"])
@pytest.mark.parametrize("plain", [False, True], ids=["weighted", "plain"])
def test_a_module_moved_on_one_rank_raises_the_same_on_all(plain, cast):
    told = run_ranks(moved_on_one_rank, 3, plain, cast)
    assert same(told)
    text, again = told[0]
    assert text.count("[rank 1 of 3]") == 1
    if cast == "for now":
        assert "2.bias was torch.float32" in text
    else:
        assert "gradient has left its bucket" in text and again == text


def zeroed_on_one_rank(group):
    model = pk.DataParallel(Leaf(3), group)
    model.backward(model(1.0), 1)
    if group.rank == 0:
        model.zero_grad()
    loss = model(1.0)
    text = message_of(RuntimeError, lambda: model.backward(loss, 1))
    return text, step_to_four(group, model)


def test_gradients_zeroed_on_one_rank_only_are_refused_on_all_with_one_message():
    told = run_ranks(zeroed_on_one_rank, 2)
    assert same(told) and told[0][1]
    assert told[0][0].count("[rank ") == 1 and "[rank 1 of 2]" in told[0][0]


MODULES = {
    "shape": lambda rank: nn.Linear(5, 3 + rank),
    "dtype": lambda rank: nn.Linear(5, 3, dtype=[torch.float32, torch.bfloat16][rank]),
    "name": lambda rank: nn.Sequential(nn.Linear(5, 3)) if rank else nn.Linear(5, 3),
    "number": lambda rank: nn.Linear(5, 3, bias=rank == 0),
    "buffer": lambda rank: nn.BatchNorm1d(3 + rank, affine=False),
    "more buffers": lambda rank: nn.Sequential(
        nn.Linear(5, 3), nn.BatchNorm1d(3, affine=False, track_running_stats=rank == 0)
    ),
}


def different_modules(group):
    return {
        what: message_of(RuntimeError, lambda make=make: pk.DataParallel(make(group.rank), group))
        for what, make in MODULES.items()
    }


def test_modules_that_differ_between_ranks_raise_on_each():
    for texts in run_ranks(different_modules, 2):
        assert all("rank 1 differs from rank 0" in text for text in texts.values())
        assert "[4, 5] instead of" in texts["shape"] and "bfloat16" in texts["dtype"]
        assert "running_mean" in texts["buffer"] and "0.weight" in texts["name"]
        assert "nothing more instead of bias" in texts["number"]
        assert "nothing more instead of 1.running_mean" in texts["more buffers"]
        assert not any("bucket_mb" in text for text in texts.values())


def bad_construction(group):
    texts = [
        message_of(ValueError, lambda: pk.DataParallel(mlp(), group, bucket_mb=-group.rank)),
        message_of(ValueError, lambda: pk.DataParallel(mlp(), group, grad_dtype=torch.int32)),
        message_of(RuntimeError, lambda: pk.DataParallel(mlp(), group, bucket_mb=1 + group.rank)),
    ]
    device = nn.Linear(5, 3, device="meta" if group.rank == 1 else "cpu")
    texts.append(message_of(ValueError, lambda: pk.DataParallel(device, group)))
    return texts


WRONG = {
    "a number": (TypeError, (5,), {}, "torch.nn.Module, got int"),
    "a list": (TypeError, ([nn.Linear(2, 2)],), {}, "got list"),
    "a lazy module": (ValueError, (nn.LazyLinear(3),), {}, "weight has no shape"),
    "bucket_mb as text": (ValueError, (nn.Linear(2, 2),), {"bucket_mb": "25"}, "'25'"),
    "endless bucket_mb": (ValueError, (nn.Linear(2, 2),), {"bucket_mb": math.inf}, "inf"),
    "grad_dtype as text": (ValueError, (nn.Linear(2, 2),), {"grad_dtype": "float32"}, "'float32'"),
    "broadcast_buffers": (RuntimeError, (nn.Linear(2, 2),), {"broadcast_buffers": 0}, "buffers 0"),
}


def wrong_on_one_rank(group):
    """On rank 1 alone; what is said there and elsewhere."""
    told = {}
    for what, (kind, arguments, options, _) in WRONG.items():
        right = (nn.Linear(2, 2),), {}
        arguments, options = (arguments, options) if group.rank == 1 else right
        told[what] = message_of(kind, lambda a=arguments, o=options: pk.DataParallel(*a, **o))
    model = pk.DataParallel(Leaf(3), group)
    assert step_to_four(group, model), "the group is usable"
    return told


def test_wrong_arguments_on_one_rank_raise_on_all():
    told = run_ranks(wrong_on_one_rank, 2)
    for what, (_, _, _, part) in WRONG.items():
        assert all(part in texts[what] for texts in told), (what, told[0][what])
        assert all("rank 1" in texts[what] for texts in told)


def test_bad_constructor_arguments_raise_on_every_rank():
    for bucket, dtype, differing, device in run_ranks(bad_construction, 2):
        assert "bucket_mb" in bucket
        assert "int32" in dtype
        assert "bucket_mb 2" in differing
        assert "meta" in device and "[rank 1 of 2]" in device


def copies(group):
    model = pk.DataParallel(mlp(), group)
    texts = [
        message_of(RuntimeError, lambda: copy.deepcopy(model)),
        message_of(RuntimeError, lambda: copy.copy(model)),
        message_of(RuntimeError, lambda: pickle.dumps(model)),
        message_of(RuntimeError, lambda: copy.deepcopy(nn.Sequential(model))),
        message_of(ValueError, lambda: model.load_state_dict(mlp().state_dict(), assign=True)),
    ]
    other = copy.deepcopy(model.module)  # what the texts advise
    mean_square(other, items([2])[0][0]).backward()
    return texts, all(p.grad is None for p in model.parameters())


def test_copying_and_pickling_are_refused_and_the_module_can_be_copied():
    [(texts, untouched)] = run_ranks(copies, 1)
    assert all("model.module" in text for text in texts[:4])
    assert "assign=False" in texts[4]
    assert untouched


def nothing_to_train(group):
    model = pk.DataParallel(nn.ReLU(), group)  # https://github.com/pytorch/pytorch/issues/25550
    out = model(torch.ones(3, requires_grad=True))
    model.backward(out.sum(), 2)
    model.backward(None, weight=0)
    frozen = pk.DataParallel(mlp().requires_grad_(False), group)
    return model.total_weight.item(), frozen(torch.ones(1, 5)).shape


def test_a_module_without_trainable_parameters_is_no_trouble():
    assert run_ranks(nothing_to_train, 2) == [(0.0, (1, 3))] * 2


def mixed(group):
    model = pk.DataParallel(Leaf(3), group)
    model.backward(model(1.0), 4, sync=False)
    text = message_of(RuntimeError, lambda: model(1.0).backward())
    model.zero_grad()
    model.backward(model(1.0), 1, sync=False)
    model(3.0).backward()
    return text, model.p.grad.tolist()


def test_a_plain_backward_after_weighted_ones_is_refused_where_it_cannot_count_right():
    texts, grads = zip(*run_ranks(mixed, 2), strict=True)
    assert same(grads) and grads[0] == [2.0] * 3
    assert all("model.backward" in text for text in texts)


def late_rank(group):
    """docs/recovery.md: after a timeout a new group and a new wrapper, from the same module."""
    short = pk.Group(timeout=timedelta(seconds=1))
    model = pk.DataParallel(mlp(), short)
    assert next_step_works(model, short)
    model.zero_grad()
    if group.rank == 1:
        time.sleep(2.5)
    message_of(pk.ParallelKitError, lambda: model.backward(None, weight=0))
    again = message_of(pk.ParallelKitError, lambda: model.backward(None, weight=0))
    new = pk.DataParallel(model.module, group)
    assert "another DataParallel" in message_of(RuntimeError, lambda: model(torch.ones(1, 5)))
    return next_step_works(new, group), again


def test_after_a_timeout_a_new_group_and_wrapper_go_on():
    for works, again in run_ranks(late_rank, 2):
        assert works
        assert "rank" in again
