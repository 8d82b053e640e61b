"""linear, gated_linear and mlp: values, gradients and what autograd is told, whoever computes."""

import pytest
import torch
import torch.nn.functional as F
from kernels_oracle import Tracked, output, preactivation, through_slope

from parallelkit.errors import UsageError
from parallelkit.in_place import gradients_in_place
from parallelkit.nn import linear_op, product_ops
from parallelkit.nn.kernel_choice import use_kernels
from parallelkit.nn.linear_op import gated_linear, linear, linear_into
from parallelkit.nn.mlp_op import mlp

FP32, FP64, FP16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
WAYS = [
    *[("triton", dtype) for dtype in (FP32, FP16, BF16)],
    *[("auto", dtype) for dtype in (FP32, FP64, FP16, BF16)],
    *[("torch", dtype) for dtype in (FP32, FP64)],
]
FUSED = [("triton", FP32), ("auto", BF16)]  # where our own derivative is at work


@pytest.fixture(autouse=True)
def interpreter():
    torch.manual_seed(0)
    try:
        import triton_interpreter
    except ImportError:  # no Triton
        yield
        return
    with triton_interpreter.repaired():
        yield


@pytest.fixture
def dtype(request):
    kernels, dtype = request.param
    if kernels == "triton":
        pytest.importorskip("triton")
    with use_kernels(kernels):
        yield dtype


def ways(pairs):
    names = [f"{kernels}-{str(dtype).removeprefix('torch.')}" for kernels, dtype in pairs]
    return pytest.mark.parametrize("dtype", pairs, ids=names, indirect=True)


def leaf(*shape, dtype):
    return torch.randn(shape).to(dtype).requires_grad_()


def check_gradients(dz, x, weight, bias, dx, dtype):
    """Those of x·Wᵀ + b, given dz."""
    (dz @ Tracked.of(weight)).round(dtype).check(dx, "dx")
    (dz.T @ Tracked.of(x)).round(dtype).check(weight.grad, "dW")
    if bias is not None:
        dz.sum().round(dtype).check(bias.grad, "db")


@ways(WAYS)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_linear_and_all_its_gradients(dtype, activation):
    x, w, b, r = (leaf(*shape, dtype=dtype) for shape in ((3, 7, 45), (67, 45), (67,), (3, 7, 67)))
    y = linear(x, w, b, activation, r)
    dy = torch.randn_like(y)
    y.backward(dy)
    flat, dy_flat = x.detach().view(-1, 45), dy.view(-1, 67)
    z = preactivation(flat, w, b).round(dtype)
    expected = output(z, activation, residual=r.detach().view(-1, 67)).round(dtype)
    expected.check(y.view(-1, 67), "y")
    assert torch.equal(r.grad, dy)
    d = Tracked.of(dy_flat)
    dz = through_slope(d, z, activation, False).round(dtype) if activation else d
    check_gradients(dz, flat, w, b, x.grad.view(-1, 45), dtype)


@ways(WAYS)
def test_relu_alone_and_its_gradients(dtype):
    x, w = leaf(21, 45, dtype=dtype), leaf(67, 45, dtype=dtype)
    y = linear(x, w, activation="relu")
    dy = torch.randn_like(y)
    y.backward(dy)
    z = preactivation(x, w)
    output(z, "relu").round(dtype).check(y, "y")
    dz = through_slope(Tracked.of(dy), z, "relu", False).round(dtype)
    check_gradients(dz, x, w, None, x.grad, dtype)


@ways(WAYS)
def test_gated_linear_and_all_its_gradients(dtype):
    x, w, b, r = (leaf(*shape, dtype=dtype) for shape in ((21, 45), (66, 45), (66,), (21, 33)))
    y = gated_linear(x, w, b, "silu", r)
    dy = torch.randn_like(y)
    y.backward(dy)
    z = preactivation(x, w, b).round(dtype)
    output(z, "silu", gated=True, residual=r).round(dtype).check(y, "y")
    assert torch.equal(r.grad, dy)
    dz = through_slope(Tracked.of(dy), z, "silu", True).round(dtype)
    check_gradients(dz, x, w, b, x.grad, dtype)


@ways(WAYS)
@pytest.mark.parametrize("gated", [False, True])
def test_mlp_and_all_its_gradients(dtype, gated):
    features = 33
    width = 2 * features if gated else features
    x, r = leaf(21, 45, dtype=dtype), leaf(21, 29, dtype=dtype)
    up, up_bias = leaf(width, 45, dtype=dtype), leaf(width, dtype=dtype)
    down, down_bias = leaf(29, features, dtype=dtype), leaf(29, dtype=dtype)
    y = mlp(x, up, down, up_bias, down_bias, "gelu_tanh", r, gated=gated)
    dy = torch.randn_like(y)
    y.backward(dy)
    z = preactivation(x, up, up_bias).round(dtype)
    h = output(z, "gelu_tanh", gated=gated).round(dtype)
    output(preactivation(h, down, down_bias), None, residual=r).round(dtype).check(y, "y")
    assert torch.equal(r.grad, dy)
    d = Tracked.of(dy)
    (d.T @ h).round(dtype).check(down.grad, "dW₂")
    d.sum().round(dtype).check(down_bias.grad, "db₂")
    dh = (d @ Tracked.of(down)).round(dtype)
    dz = through_slope(dh, z, "gelu_tanh", gated).round(dtype)
    check_gradients(dz, x, up, up_bias, x.grad, dtype)


@ways(FUSED)
@pytest.mark.parametrize("gated", [False, True])
def test_recomputing_z_changes_no_more_than_its_rounding_and_keeps_less(dtype, gated):
    def run(recompute):
        call, width = (gated_linear, 64) if gated else (linear, 32)
        torch.manual_seed(1)
        x, w, b = leaf(16, 24, dtype=dtype), leaf(width, 24, dtype=dtype), leaf(width, dtype=dtype)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(tuple(t.shape)) or t, lambda t: t
        ):
            y = call(x, w, b, "silu", recompute=recompute)
        y.backward(torch.ones_like(y))
        return [y, x.grad, w.grad, b.grad], kept

    plain, kept = run(False)
    again, kept_less = run(True)
    z = (16, 64 if gated else 32)
    assert z in kept and z not in kept_less
    assert torch.equal(plain[0], again[0])
    for kept_gradient, recomputed in zip(plain[1:], again[1:], strict=True):
        torch.testing.assert_close(recomputed, kept_gradient)


@ways([("torch", FP32)])
def test_plain_pytorch_recomputes_too(dtype):
    x, w = leaf(16, 24, dtype=dtype), leaf(32, 24, dtype=dtype)
    (kept,) = torch.autograd.grad(linear(x, w, None, "silu").sum(), w)
    (recomputed,) = torch.autograd.grad(linear(x, w, None, "silu", recompute=True).sum(), w)
    assert torch.equal(kept, recomputed)


@ways(FUSED)
def test_nothing_is_kept_for_a_backward_pass_that_cannot_come(dtype, monkeypatch):
    asked = []

    def forward(*arguments):
        asked.append(arguments[6])
        return product_ops.forward(*arguments)

    ops = type("Ops", (), {"forward": staticmethod(forward)})
    monkeypatch.setattr(linear_op, "ops", ops)
    x, w = leaf(4, 8, dtype=dtype), leaf(8, 8, dtype=dtype)
    with torch.no_grad():
        linear(x, w, None, "gelu")
    linear(x.detach(), w.detach(), None, "gelu")
    linear(x, w, None, "relu")  # y itself serves
    assert asked == [False, False, False]
    linear(x, w, None, "gelu")
    assert asked[3]


@ways(FUSED)
@pytest.mark.parametrize("wanted", range(1, 16))
def test_gradients_are_made_for_whoever_requires_them(dtype, wanted):
    tensors = [torch.randn(s).to(dtype) for s in ((5, 8), (6, 8), (6,), (5, 6))]
    for i, t in enumerate(tensors):
        t.requires_grad_(bool(wanted >> i & 1))
    linear(tensors[0], tensors[1], tensors[2], "silu", tensors[3]).sum().backward()
    reference = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    (F.silu(F.linear(*reference[:3])) + reference[3]).sum().backward()
    for t, expected in zip(tensors, reference, strict=True):
        assert (t.grad is None) == (expected.grad is None)
        if t.grad is not None:
            torch.testing.assert_close(t.grad.double(), expected.grad, rtol=3e-2, atol=3e-2)


@ways(WAYS)
@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 3), (4, 0, 3), (4, 5, 0)])
def test_empty_sizes(dtype, m, n, k):
    x, w, b = leaf(m, k, dtype=dtype), leaf(n, k, dtype=dtype), leaf(n, dtype=dtype)
    y = linear(x, w, b, "gelu")
    y.sum().backward()
    assert torch.equal(y, F.gelu(b).expand(m, n).to(dtype))
    for t in (x, w, b):
        assert t.grad.shape == t.shape and not t.grad.isnan().any()


@ways(WAYS)
def test_a_vector_and_a_view_that_cannot_be_flattened(dtype):
    w = leaf(6, 4, dtype=dtype)
    vector = torch.randn(4).to(dtype)
    row = linear(vector.view(1, 4), w)
    assert torch.equal(linear(vector, w), row[0])
    cube = torch.randn(3, 2, 4).to(dtype).transpose(0, 1)
    assert torch.equal(linear(cube, w), linear(cube.contiguous(), w))


class TestGradientsInPlace:
    @ways(FUSED)
    @pytest.mark.parametrize("buffer", [None, FP32], ids=["same", "fp32"])
    def test_are_added_to_grad_with_no_temporary_and_hooks_run(self, dtype, buffer, monkeypatch):
        monkeypatch.setattr(product_ops, "weight_gradient", None)  # whose result would be one
        x = leaf(21, 45, dtype=dtype)
        w, b = leaf(67, 45, dtype=dtype), leaf(67, dtype=dtype)
        buffer = buffer or dtype
        for parameter in (w, b):
            parameter.grad_dtype = buffer
            parameter.grad = torch.randn(parameter.shape).to(buffer)
        before = [parameter.grad.clone() for parameter in (w, b)]
        places = [parameter.grad.data_ptr() for parameter in (w, b)]
        fired = []
        for parameter in (w, b):
            parameter.register_post_accumulate_grad_hook(fired.append)
        y = linear(x, w, b)
        dy = torch.randn_like(y)
        with gradients_in_place():
            y.backward(dy)
        d = Tracked.of(dy)
        (d.T @ Tracked.of(x.detach()) + Tracked.of(before[0])).round(buffer).check(w.grad, "dW")
        (d.sum() + Tracked.of(before[1])).round(buffer).check(b.grad, "db")
        assert [parameter.grad.data_ptr() for parameter in (w, b)] == places
        assert len(fired) == 2
        assert {id(parameter) for parameter in fired} == {id(w), id(b)}

    @ways(FUSED)
    @pytest.mark.parametrize("second", [linear, F.linear], ids=["fused", "plain"])
    def test_count_a_tied_weight_twice(self, dtype, second):
        x, w = leaf(8, 16, dtype=dtype), leaf(16, 16, dtype=dtype)
        w.grad_dtype, w.grad = FP32, torch.zeros(16, 16)
        h = linear(x, w)
        with gradients_in_place():
            second(h, w).sum().backward()
        dy = Tracked.of(torch.ones(8, 16))
        dh = (dy @ Tracked.of(w)).round(dtype)
        expected = dh.T @ Tracked.of(x) + (dy.T @ Tracked.of(h)).round(dtype)
        expected.round(FP32).check(w.grad, "dW")

    @ways(FUSED)
    def test_fall_back_where_there_is_no_buffer_yet(self, dtype):
        x, w, b = leaf(8, 16, dtype=dtype), leaf(4, 16, dtype=dtype), leaf(4, dtype=dtype)
        b.grad = torch.zeros_like(b)
        with gradients_in_place():
            linear(x, w, b).sum().backward()
        assert w.grad.layout == torch.strided
        torch.testing.assert_close(b.grad, torch.full_like(b, 8))

    @ways(FUSED)
    def test_of_mlp(self, dtype):
        x, up, down = leaf(8, 16, dtype=dtype), leaf(24, 16, dtype=dtype), leaf(4, 24, dtype=dtype)
        mlp(x, up, down).sum().backward()
        expected = [up.grad, down.grad]
        up.grad, down.grad = torch.zeros_like(up), torch.zeros_like(down)
        with gradients_in_place():
            mlp(x, up, down).sum().backward()
        assert all(map(torch.equal, [up.grad, down.grad], expected))


@ways([("auto", BF16)])
def test_a_gradient_in_fp32_is_not_rounded_to_16_bits_on_the_way(dtype):
    x, w = leaf(21, 45, dtype=dtype), leaf(67, 45, dtype=dtype)
    w.grad_dtype = FP32
    y = linear(x, w)
    dy = torch.randn_like(y)
    y.backward(dy)
    (Tracked.of(dy).T @ Tracked.of(x.detach())).round(FP32).check(w.grad, "dW")


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_autocast_casts_as_for_torch_linear(kernels):
    x, w, b, r = (
        leaf(9, 16, dtype=FP32),
        leaf(8, 16, dtype=FP32),
        leaf(8, dtype=FP32),
        torch.randn(9, 8),
    )
    with use_kernels(kernels), torch.autocast("cpu", dtype=BF16):
        y = linear(x, w, b, "gelu")
        wide = linear(x, w, b, "gelu", r)
    assert y.dtype == BF16 and wide.dtype == FP32  # as bf16 + fp32 is
    y.float().sum().backward()
    z = preactivation(x.detach().bfloat16(), w.bfloat16(), b.bfloat16()).round(BF16)
    output(z, "gelu").round(BF16).check(y, "y")
    dz = through_slope(Tracked.of(torch.ones(9, 8)), z, "gelu", False).round(BF16)
    (dz.T @ Tracked.of(x.detach().bfloat16())).round(BF16).check(w.grad, "dW")
    assert w.grad.dtype == x.grad.dtype == FP32


def test_autocast_around_backward_changes_nothing():
    x, w = leaf(9, 16, dtype=BF16), leaf(8, 16, dtype=BF16)
    dy = torch.randn(9, 8).bfloat16()
    plain = torch.autograd.grad(linear(x, w, None, "gelu"), (x, w), dy)
    y = linear(x, w, None, "gelu")
    with torch.autocast("cpu", dtype=FP16):
        cast = torch.autograd.grad(y, (x, w), dy)
    assert all(map(torch.equal, plain, cast))


@ways(FUSED)
@pytest.mark.parametrize("call", [linear, gated_linear])
def test_second_derivatives_are_refused_by_name(dtype, call):
    x, w = leaf(4, 8, dtype=dtype), leaf(8, 8, dtype=dtype)
    (dx,) = torch.autograd.grad(call(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(UsageError, match=r'second derivatives.*use_kernels\("torch"\)'):
        dx.sum().backward()


def test_second_derivatives_are_there_in_plain_pytorch():
    x, w = leaf(4, 8, dtype=FP64), leaf(6, 8, dtype=FP64)
    for kernels in ("auto", "torch"):
        with use_kernels(kernels):
            assert torch.autograd.gradgradcheck(lambda x, w: linear(x, w, None, "gelu"), (x, w))


@ways([("triton", FP32), ("auto", BF16), ("torch", FP32)])
def test_compiled_without_a_graph_break_to_the_same_bits(dtype):
    tensors = [leaf(*shape, dtype=dtype) for shape in ((9, 16), (24, 16), (24,), (16, 12))]

    def block(x, w, b, down):
        h = gated_linear(x, w, b)
        return mlp(linear(h, down, None, "gelu"), w, down, b, residual=x, gated=True)

    def gradients(function):
        return torch.autograd.grad(function(*tensors).float().square().sum(), tensors)

    torch._dynamo.reset()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for ours, eager in zip(gradients(compiled), gradients(block), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)


def test_operators_keep_their_promises_to_pytorch():
    x, w, b, dy = torch.randn(5, 8), torch.randn(6, 8), torch.randn(6), torch.randn(5, 6)
    w.requires_grad_()
    pre, buffer = torch.randn(5, 6), torch.zeros(6, 8)
    for operator, arguments in [
        (product_ops.forward, (x, w, b, dy, "gelu", False, True, "torch")),
        (product_ops.forward, (x, w, None, None, "silu", True, False, "torch")),
        (product_ops.partial_sum, (x, w.detach(), b, torch.zeros(5, 6), "torch")),
        (product_ops.input_gradient, (dy, w.detach(), None, None, False, "torch")),
        (product_ops.weight_gradient, (dy, x, True, FP32, "torch")),
        (product_ops.add_weight_gradient, (dy, x, buffer, torch.zeros(6), "torch")),
        (product_ops.activation_gradient, (dy, pre, "gelu", False, "torch")),
    ]:
        torch.library.opcheck(operator, arguments)


@ways(WAYS)
def test_linear_into_leaves_shares_whose_sum_has_the_bias_once(dtype):
    x, w, b = (torch.randn(s).to(dtype) for s in ((2, 5, 12), (6, 12), (6,)))
    wide = FP64 if dtype == FP64 else FP32
    shares = torch.full((3, 2, 5, 6), torch.nan, dtype=wide)
    for rank, columns in enumerate((slice(0, 5), slice(5, 10), slice(10, 12))):
        linear_into(shares[rank], x[..., columns], w[:, columns], b if rank == 0 else None)
    expected = preactivation(x.view(10, 12), w, b)
    expected.error += 6 * expected.unit * (x.view(10, 12).abs().double() @ w.abs().double().T + 1)
    expected.check(shares.double().sum(0).view(10, 6), "sum")
