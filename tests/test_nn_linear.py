"""The split linear layers against nn.Linear in float64, on 2 to 4 ranks."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

import parallelkit as pk
from parallelkit.nn.term import Term

ACTIVATIONS = {
    None: nn.Identity(),
    "relu": nn.ReLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
}


def random(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def poison(group):
    """Fill what the group's pool of memory will hand out, and what it gave, with NaN."""
    for dtype in (torch.float32, torch.float64):
        terms = [Term(group, (4096,), dtype) for _ in range(3)]
        for term in terms:
            term.tensor.fill_(float("nan"))
            term.release()


def linear(inputs, outputs, bias, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias, dtype=torch.float64)


def gathered(layer, tensors):
    """The whole layer's tensors of every rank's (`tensors` by parameter name)."""
    found = {}
    for name, parameter in layer.named_parameters():
        split = pk.nn.split.split_of(parameter)
        found[name] = split.gather(tensors[name]) if split else tensors[name]
    return found


def largest_difference(found, wanted):
    """NaN counts as infinite."""
    differences = [
        float("inf")
        if found[n] is None
        else float((found[n] - wanted[n]).abs().max().nan_to_num(1e9))
        for n in wanted
        if wanted[n].numel()
    ]
    return max(differences, default=0.0)


def pair_case(group, sizes, bias, activation, shape, sequence):
    """column → row against two nn.Linear: y and every gradient."""
    hidden, inner = sizes
    up, down = linear(hidden, inner, bias, 1), linear(inner, hidden, bias, 2)
    whole = nn.Sequential(up, ACTIVATIONS[activation], down)
    column = pk.nn.ColumnParallelLinear.from_linear(
        up, group, activation=activation, sequence_parallel=sequence
    )
    row = pk.nn.RowParallelLinear.from_linear(down, group, sequence_parallel=sequence)
    poison(group)
    x = random(3, *shape, hidden).requires_grad_()
    dy = random(4, *shape, hidden)
    wanted = whole(x)
    wanted.backward(dy)

    dim, length = len(shape) - 1, shape[-1]
    part = slice(*pk.shard_bounds(length, group.size, group.rank)) if sequence else slice(None)
    cut = (slice(None),) * dim + (part,)
    mine = x.detach()[cut].clone().requires_grad_()
    found = row(column(mine))
    found.backward(dy[cut])
    results = {
        "y": (found.detach(), wanted.detach()[cut]),
        "dx": (mine.grad, x.grad[cut]),
    }
    for name, layer, reference in (("column", column, up), ("row", row, down)):
        gradients = gathered(layer, {n: p.grad for n, p in layer.named_parameters()})
        for key, parameter in reference.named_parameters():
            results[f"{name} {key}"] = gradients[key], parameter.grad
    return {
        name: largest_difference({0: found}, {0: wanted})
        for name, (found, wanted) in results.items()
    }


PAIRS = [
    ((8, 32), True, "gelu", (4,), False),
    ((8, 32), True, "gelu", (2, 6), False),
    ((6, 5), True, None, (3,), False),  # 5 does not divide
    ((3, 2), True, "relu", (2, 3), False),  # fewer outputs than ranks
    ((7, 9), False, "silu", (1, 1, 5), False),
    ((6, 12), True, "gelu_tanh", (7,), True),  # a sequence of 7 over 2
    ((6, 12), True, None, (2, 7), True),
    ((5, 7), False, "gelu", (3, 2), True),  # fewer tokens than 4 ranks
    ((5, 7), True, None, (2, 1, 3), True),
    ((4, 4), True, None, (0,), False),
]


def pairs(group):
    return [(case, pair_case(group, *case)) for case in PAIRS]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_and_row_equal_the_unsplit_pair_in_values_and_all_gradients(size):
    for results in pk.testing.run_ranks(pairs, size):
        for case, differences in results:
            for what, difference in differences.items():
                assert difference < 1e-12, (case, what, difference)


def row_bias(group):
    row = pk.nn.RowParallelLinear(4, 3, group=group)
    with torch.no_grad():
        row.weight.fill_(1.0)
        row.bias.copy_(torch.tensor([100.0, 200.0, 300.0]))
    start, stop = pk.shard_bounds(4, group.size, group.rank)
    y = row(torch.ones(2, stop - start))
    y.sum().backward()
    return y.tolist(), row.bias.grad.tolist()


@pytest.mark.parametrize("size", [2, 4])
def test_the_row_bias_is_added_once_and_its_gradient_counts_once(size):
    for y, gradient in pk.testing.run_ranks(row_bias, size):
        assert y == [[104.0, 204.0, 304.0]] * 2
        assert gradient == [2.0, 2.0, 2.0]


def gathers_and_splits(group):
    """A gathered output and an input that is cut here."""
    whole = linear(6, 5, True)
    column = pk.nn.ColumnParallelLinear.from_linear(whole, group, gather_output=True)
    second = linear(5, 3, True, 1)
    row = pk.nn.RowParallelLinear.from_linear(second, group, input_is_parallel=False)
    x = random(1, 4, 6).requires_grad_()
    mine = x.detach().clone().requires_grad_()
    wanted, found = second(whole(x).tanh()), row(column(mine).tanh())
    wanted.square().sum().backward()
    found.square().sum().backward()
    gradients = gathered(column, {n: p.grad for n, p in column.named_parameters()})
    return [
        float((found - wanted).detach().abs().max()),
        float((mine.grad - x.grad).abs().max()),
        largest_difference(gradients, {n: p.grad for n, p in whole.named_parameters()}),
        largest_difference(
            gathered(row, {n: p.grad for n, p in row.named_parameters()}),
            {n: p.grad for n, p in second.named_parameters()},
        ),
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_a_gathered_output_and_a_split_input_pass_gradients_on(size):
    assert max(max(rank) for rank in pk.testing.run_ranks(gathers_and_splits, size)) < 1e-12


INITIAL = [(3, 1), (8, 7), (5, 33), (30, 200)]


def initial(group):
    """Whether the gathered parameters have nn.Linear's bits, and the generators end alike."""
    pk.nn.split._CHUNK_ELEMENTS = 1000  # so that small weights are drawn in several parts
    problems = []
    for (inputs, outputs), dtype in itertools.product(INITIAL, (torch.float32, torch.bfloat16)):
        torch.manual_seed(5)
        whole = nn.Linear(inputs, outputs, dtype=dtype)
        after = torch.rand(3)
        for kind in (pk.nn.ColumnParallelLinear, pk.nn.RowParallelLinear):
            torch.manual_seed(5)
            layer = kind(inputs, outputs, group=group, dtype=dtype)
            same = torch.equal(torch.rand(3), after)
            back = layer.to_linear()
            same &= torch.equal(back.weight, whole.weight) and torch.equal(back.bias, whole.bias)
            again = kind.from_linear(back, group)
            same &= torch.equal(again.weight, layer.weight) and torch.equal(again.bias, layer.bias)
            if not same:
                problems.append((inputs, outputs, dtype, kind.__name__))
    return problems


@pytest.mark.parametrize("size", [1, 2, 3])
def test_with_one_seed_the_gathered_weight_is_nn_linears_to_the_bit(size):
    assert pk.testing.run_ranks(initial, size) == [[]] * size


def marks(group):
    column = pk.nn.ColumnParallelLinear(4, 6, group=group)
    row = pk.nn.RowParallelLinear(6, 4, group=group)
    copied = copy.deepcopy(column)
    copied.to(torch.float64)
    return [
        getattr(p, "tp_split_dim", None) if getattr(p, "tp_group", None) is group else None
        for p in (column.weight, column.bias, row.weight, row.bias, copied.weight, copied.bias)
    ]


def test_split_parameters_say_so_also_in_copies():
    assert pk.testing.run_ranks(marks, 2) == [[0, 0, 1, None, 0, 0]] * 2


def low_precision(group, dtype):
    up, down = linear(64, 96, True, 1), linear(96, 64, True, 2)
    low = [copy.deepcopy(m).to(dtype) for m in (up, down)]
    x, dy = random(3, 16, 64).to(dtype), random(4, 16, 64).to(dtype)
    exact = [copy.deepcopy(m).double() for m in low]
    a = x.double().requires_grad_()
    hidden = nn.functional.gelu(exact[0](a))
    wanted = exact[1](hidden)
    wanted.backward(dy.double())
    wanted = wanted.detach()
    column = pk.nn.ColumnParallelLinear.from_linear(low[0], group, activation="gelu")
    row = pk.nn.RowParallelLinear.from_linear(low[1], group)
    b = x.clone().requires_grad_()
    found = row(column(b))
    found.backward(dy)
    unit = torch.finfo(dtype).eps
    return [
        float((found.detach().double() - wanted).abs().max() / wanted.abs().max()) / unit,
        float((b.grad.double() - a.grad).abs().max() / a.grad.abs().max()) / unit,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_stay_within_a_few_roundings(dtype):
    for y, dx in pk.testing.run_ranks(low_precision, 2, dtype):
        assert y < 4
        assert dx < 4


def under_autocast(group):
    up, down = linear(8, 12, True, 1).float(), linear(12, 8, True, 2).float()
    column = pk.nn.ColumnParallelLinear.from_linear(up, group)
    row = pk.nn.RowParallelLinear.from_linear(down, group)
    x = random(3, 5, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = row(column(x)), down(up(x))
    found.float().sum().backward()
    return (
        found.dtype == wanted.dtype and column.weight.grad.dtype == torch.float32,
        float((found.float() - wanted.float()).detach().abs().max()),
    )


def test_autocast_casts_as_for_nn_linear():
    for same, difference in pk.testing.run_ranks(under_autocast, 2):
        assert same
        assert difference < 0.05


def compiled(group):
    up, down = linear(6, 8, True, 1), linear(8, 6, True, 2)
    differences = {}
    for sequence, backend in itertools.product((False, True), ("eager", "aot_eager")):
        options = {"sequence_parallel": sequence}
        column = pk.nn.ColumnParallelLinear.from_linear(up, group, activation="gelu", **options)
        row = pk.nn.RowParallelLinear.from_linear(down, group, **options)
        layers, found = nn.Sequential(column, row), []
        for run in (layers, torch.compile(layers, backend=backend, fullgraph=True)):
            layers.zero_grad()
            x = random(3, 2, 4, 6).requires_grad_()
            y = run(x)
            y.square().sum().backward()
            found.append([y.detach(), x.grad, *(p.grad.clone() for p in layers.parameters())])
        pairs = zip(*found, strict=True)
        differences[sequence, backend] = max(float((a - b).abs().max()) for a, b in pairs)
    return differences


def test_compiled_layers_give_the_same_numbers_in_one_graph():
    for differences in pk.testing.run_ranks(compiled, 2):
        assert len(differences) == 4
        assert max(differences.values()) < 1e-13, differences


class ThreeReaders(nn.Module):
    """q, k and v: as many outputs each as one layer has in all."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(1024, 8, bias=b) for b in (True, False, True))

    def forward(self, x):
        return self.q(x) + self.k(x) * 2 + self.v(x) * 3


def overlaps(group, siblings, sequence):
    """Whether the reduction of dx begins before weights' gradients are computed; the errors."""
    from parallelkit.nn import column_op, shared_input

    events = []
    start, gradients = Term.start, column_op.parameter_gradients

    def noted_start(term, scatter=False):
        events.append("scatter" if scatter else "sum")
        start(term, scatter)

    def noted_gradients(*arguments):
        events.append("dW")
        return gradients(*arguments)

    Term.start = noted_start
    column_op.parameter_gradients = shared_input.parameter_gradients = noted_gradients
    torch.manual_seed(0)
    whole = ThreeReaders() if siblings else nn.Sequential(nn.Linear(1024, 8))
    x = random(3, 2, 257, 1024, dtype=torch.float32)
    parts = slice(*pk.shard_bounds(257, group.size, group.rank)) if sequence else slice(None)
    mine = x[:, parts].clone().requires_grad_()
    layer = pk.tensor_parallel(
        copy.deepcopy(whole), group, {"*": "colwise"}, sequence_parallel=sequence
    )
    y = layer(mine)
    loss = (y.double() ** 2).sum()
    loss.backward(retain_graph=True)
    kept = list(events)
    first = mine.grad.clone(), pk.gather_gradients(layer)
    layer.zero_grad()
    mine.grad = None
    loss.backward()  # nothing of the first pass is left over
    again = pk.gather_gradients(layer)
    assert torch.equal(mine.grad, first[0])
    assert all(torch.equal(first[1][name], again[name]) for name in again)

    whole, x = whole.double(), x.double().requires_grad_()
    (whole(x) ** 2).sum().backward()
    wanted = {name: p.grad for name, p in whole.named_parameters()} | {"x": x.grad[:, parts]}
    found = first[1] | {"x": first[0]}
    return kept, max(
        float((found[n] - wanted[n]).abs().max() / wanted[n].abs().max()) for n in wanted
    )


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("siblings", [False, True])
def test_the_sum_of_dx_travels_while_the_weights_gradients_are_computed(siblings, sequence):
    for events, error in pk.testing.run_ranks(overlaps, 2, siblings, sequence):
        assert events == ["scatter" if sequence else "sum"] + ["dW"] * (3 if siblings else 1)
        assert error < 1e-5


def test_so_it_does_over_torch_distributed(monkeypatch):
    monkeypatch.setenv("PARALLELKIT_ALGORITHM", "reference")
    for events, error in pk.testing.run_ranks(overlaps, 2, True, True):
        assert events == ["scatter", "dW", "dW", "dW"]
        assert error < 1e-5


def frozen_parts(group):
    """What needs no gradient gets none, beside siblings that do."""
    torch.manual_seed(0)
    whole = ThreeReaders().double()
    for parameter in (whole.q.weight, whole.v.bias, *whole.k.parameters()):
        parameter.requires_grad_(False)
    layer = pk.tensor_parallel(copy.deepcopy(whole), group, {"*": "colwise"})
    x = random(3, 5, 1024)
    layer(x).sum().backward()
    whole(x).sum().backward()
    found = pk.gather_gradients(layer)
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    return found.keys() == wanted.keys() and largest_difference(found, wanted) < 1e-12


def test_siblings_of_which_some_are_frozen_get_their_gradients_alone():
    assert pk.testing.run_ranks(frozen_parts, 2) == [True, True]


def readers_are_let_go(group):
    """A step's activations go with its graph, without the garbage collector."""
    layer = pk.tensor_parallel(ThreeReaders(), group, {"*": "colwise"})
    gc.disable()
    x = torch.ones(4, 1024, requires_grad=True)
    entered = weakref.ref(layer.q.shared_input.enter(x).x)
    for _ in range(2):
        layer.k(x)
    y = layer(x)
    y.sum().backward()
    del y, x
    alive = entered() is not None
    gc.enable()
    return alive


def test_an_activation_that_siblings_share_is_let_go_after_its_last_reader():
    assert pk.testing.run_ranks(readers_are_let_go, 2) == [False, False]


def bad_calls(group):
    messages = []
    column = pk.nn.ColumnParallelLinear(4, 6, group=group)
    for call in (
        lambda: column(torch.ones(2, 5)),
        lambda: pk.nn.ColumnParallelLinear(4, 6, group=group, activation="tanh"),
        lambda: pk.nn.RowParallelLinear(4, 6, group=group, sequence_parallel=True)(torch.ones(2)),
        lambda: pk.nn.ColumnParallelLinear(4, 6, group="all"),
        lambda: pk.nn.functional.gather_from_group(torch.ones(1 + 2 * group.rank), group),
        lambda: pk.nn.functional.gather_from_group(torch.ones(3), group, length=5),
        lambda: pk.nn.functional.gather_from_group(torch.ones(3), group, 1),
        lambda: pk.nn.functional.gather_from_group(torch.ones(3), group, grad="sum"),
        lambda: pk.nn.functional.reduce_from_group(torch.ones(2 + group.rank), group),
    ):
        try:
            call()
            messages.append("no error")
        except pk.ParallelKitError as error:
            messages.append(f"{type(error).__name__}: {error}")
    total = pk.nn.functional.reduce_from_group(torch.ones(1), group)
    return messages, total.item()


def test_wrong_calls_say_what_was_wanted_and_the_group_stays_usable():
    results = pk.testing.run_ranks(bad_calls, 2)
    for messages, total in results:
        assert total == 2.0
        parts = [
            "InvalidArgumentError: ColumnParallelLinear: input must be [..., K]",
            "activation must be relu",
            "with sequence_parallel, x must be [tokens, hidden]",
            "InvalidTypeError: group must be a parallelkit.Group or a DeviceMesh",
            "the ranks hold [1, 3]",
            "must be 2 long, got 3 [rank 1 of 2]",
            "dim must be in [-1, 1)",
            'grad must be "replicated" or "partial"',
            "CollectiveMismatchError: tensor-parallel sum",
        ]
        for message, part in zip(messages, parts, strict=True):
            assert part in message
