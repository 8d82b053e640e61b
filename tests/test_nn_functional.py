"""Each exchange of activations and its gradient against plain tensors."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import parallelkit as pk

F = pk.nn.functional
SHAPES = [(5,), (4, 7), (2, 3, 5), (1, 1), (3, 0, 2)]


def random(seed, rank, shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(shape, generator=generator, dtype=dtype)


def part(x, dim, size, rank):
    start, stop = pk.shard_bounds(x.shape[dim], size, rank)
    return x.narrow(dim, start, stop - start)


def with_gradient(function, x, dy):
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(dy)
    return y.detach(), x.grad


def exchanges(group):
    """The names of those whose value or gradient is wrong."""
    size, rank, wrong = group.size, group.rank, []
    everyone = range(size)
    for shape in SHAPES:
        whole = random(0, 0, shape)
        terms = [random(1, r, shape) for r in everyone]  # each rank's own
        total = torch.stack(terms).sum(0)
        dims = [None, *range(-len(shape), len(shape))]
        for dim in dims:
            at = {} if dim is None else {"dim": dim}
            along = -1 if dim is None else dim
            mine = part(whole, along, size, rank)
            cases = {
                "scatter": (F.scatter_to_group, whole, mine, part(total, along, size, rank)),
                "gather": (F.gather_from_group, mine, whole, terms[rank]),
                "gather partial": (F.gather_from_group, mine, whole, terms[rank]),
                "reduce_scatter": (
                    F.reduce_scatter_to_group,
                    terms[rank],
                    part(total, along, size, rank),
                    mine,
                ),
            }
            gradients = {
                "scatter": total,
                "gather": part(terms[rank], along, size, rank),
                "gather partial": part(total, along, size, rank),
                "reduce_scatter": whole,
            }
            for name, (function, x, wanted, dy) in cases.items():
                options = at | ({"grad": "partial"} if name == "gather partial" else {})
                y, dx = with_gradient(lambda t: function(t, group, **options), x, dy)  # noqa: B023
                if not torch.allclose(y, wanted, rtol=1e-15, atol=1e-15):
                    wrong.append((name, shape, dim, "value"))
                if not torch.allclose(dx, gradients[name], rtol=1e-15, atol=1e-15):
                    wrong.append((name, shape, dim, "gradient"))
        y, dx = with_gradient(lambda t: F.copy_to_group(t, group), whole, terms[rank])
        if not (torch.equal(y, whole) and torch.allclose(dx, total, rtol=1e-15, atol=1e-15)):
            wrong.append(("copy", shape))
        y, dx = with_gradient(lambda t: F.reduce_from_group(t, group), terms[rank], whole)
        if not (torch.allclose(y, total, rtol=1e-15, atol=1e-15) and torch.equal(dx, whole)):
            wrong.append(("reduce", shape))
    return wrong


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_exchange_and_its_gradient(size):
    assert pk.testing.run_ranks(exchanges, size) == [[]] * size


def test_the_same_over_plain_torch_distributed(monkeypatch):
    monkeypatch.setenv("PARALLELKIT_ALGORITHM", "reference")
    assert pk.testing.run_ranks(exchanges, 2) == [[]] * 2


def low_precision_sum(group):
    found = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        terms = [random(3, r, (1000,)).to(dtype) for r in range(group.size)]
        exact = torch.stack([t.double() for t in terms]).sum(0)
        y = F.reduce_from_group(terms[group.rank], group)
        bound = torch.finfo(dtype).eps * exact.abs() + 1e-7 * sum(t.abs() for t in terms)
        found[str(dtype)] = bool(((y.double() - exact).abs() <= bound).all())
    return found


def test_sums_of_16_bits_round_once():
    for found in pk.testing.run_ranks(low_precision_sum, 4):
        assert all(found.values()), found


def a_kept_result_stays(group):
    """A result must not lie in memory that later sums use again."""
    first = F.reduce_from_group(torch.full((100,), 1.0), group)
    for _ in range(5):
        F.reduce_from_group(torch.full((100,), 7.0), group)
    return first.unique().tolist()


def test_results_do_not_change_with_later_calls():
    assert pk.testing.run_ranks(a_kept_result_stays, 2) == [[2.0]] * 2


def growing_sizes(group):
    return [
        float(F.reduce_from_group(torch.full((n,), float(n)), group).double().sum())
        for n in (1, 5000, 3, 70000, 0, 4097, 69999)
    ]


def test_sizes_may_grow_and_shrink():
    wanted = [2.0 * n * n for n in (1, 5000, 3, 70000, 0, 4097, 69999)]
    assert pk.testing.run_ranks(growing_sizes, 2) == [wanted] * 2


def over_a_mesh(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    y = F.reduce_from_group(torch.tensor([float(10 ** dist.get_rank())]), mesh["tp"])
    again = F.reduce_from_group(torch.tensor([1.0]), mesh["dp"])
    return y.item(), again.item()


def test_a_dimension_of_a_device_mesh_is_a_group():
    assert pk.testing.run_ranks(over_a_mesh, 4) == [
        (11.0, 2.0), (11.0, 2.0), (1100.0, 2.0), (1100.0, 2.0),
    ]  # fmt: skip
