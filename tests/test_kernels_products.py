"""Every kernel, dtype, epilogue and ragged edge against float64: through Triton's interpreter, and
where there is a GPU, compiled for it.

Outputs are filled with NaN before a kernel runs (PyTorch's deterministic mode does that), so that
an element no program writes is seen. Bounds come from the error analysis of kernels_oracle.py.
"""

import mmap

import pytest
import torch

pytest.importorskip("triton")

import triton_interpreter  # noqa: E402
from kernels_oracle import ACTIVATIONS, Tracked, output, preactivation, through_slope  # noqa: E402
from parallelkit.kernels import configs, launch, linear  # noqa: E402
from parallelkit.kernels.configs import Config  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Small tiles, so that small matrices have several. The persistent one is run by two programs.
CONFIGS = {
    "pointers": Config(32, 32, 64, warps=4, stages=1),
    "descriptors": Config(
        32, 32, 64, warps=4, stages=1, parts=2, group=2, descriptors=True, flatten=True
    ),
}
# Ragged against the tiles; rows of every operand in both orders are multiples of 16 bytes, or not.
SIZES = {"pointers": (40, 45, 67), "descriptors": (72, 40, 72)}
GPU_SIZES = {"GPU": (300, 520, 392), "GPU, ragged": (301, 515, 389)}
if not torch.cuda.is_available():
    GPU_SIZES = {}


@pytest.fixture(autouse=True)
def interpreter():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    with triton_interpreter.repaired():
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(
    params=[*CONFIGS, *(pytest.param(name, marks=pytest.mark.gpu) for name in GPU_SIZES)]
)
def sizes(request, monkeypatch):
    """M, N, K, under one of the configurations; or on the GPU, under what the table gives it."""
    if request.param in GPU_SIZES:
        with torch.device("cuda"):
            yield GPU_SIZES[request.param]
        return
    monkeypatch.setattr(configs, "choose", lambda *arguments: CONFIGS[request.param])
    monkeypatch.setattr(configs, "processors", lambda device: 2)
    yield SIZES[request.param]


@pytest.fixture(params=DTYPES, ids=str)
def random(request):
    """A maker of random matrices of a dtype."""
    return lambda *shape: torch.randn(shape).to(request.param)


def test_empty_tensors_are_poisoned():
    assert torch.empty(3).isnan().all()
    assert torch.empty(3, dtype=torch.bfloat16).new_empty(2, 2).isnan().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_with_bias_residual_and_kept_z(sizes, random, activation):
    m, n, k = sizes
    x, w, b, r = random(m, k), random(n, k), random(n), random(m, n)
    y, pre = linear.forward(x, w, b, r, activation, False, True)
    z = preactivation(x, w, b)
    z.round(x.dtype).check(pre, "z")
    output(z, activation, residual=r).round(x.dtype).check(y, "y")


def test_bare_forward(sizes, random):
    m, n, k = sizes
    x, w = random(m, k), random(n, k)
    y, pre = linear.forward(x, w, None, None, None, False, False)
    preactivation(x, w).round(x.dtype).check(y, "y")
    assert pre is None


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("extras", [True, False])
def test_gated_forward(sizes, random, activation, extras):
    m, n, k = sizes
    x, w, b, r = random(m, k), random(2 * n, k), random(2 * n), random(m, n)
    if not extras:
        b = r = None
    y, pre = linear.forward(x, w, b, r, activation, True, extras)
    z = preactivation(x, w, b)
    output(z, activation, gated=True, residual=r).round(x.dtype).check(y, "y")
    if extras:
        z.round(x.dtype).check(pre, "z")


def test_a_residual_of_a_wider_dtype_is_added_unrounded(sizes):
    m, n, k = sizes
    x, w, r = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16(), torch.randn(m, n)
    y, _ = linear.forward(x, w, None, r, "relu", False, False)
    output(preactivation(x, w), "relu", residual=r).round(torch.float32).check(y, "y")


def test_shares_of_a_row_split_layer_sum_to_the_layer_with_the_bias_once(sizes, random):
    m, n, k = sizes
    x, w, b = random(m, 2 * k), random(n, 2 * k), random(n)
    shares = torch.empty(2, m, n)
    linear.partial_sum(x[:, :k], w[:, :k], b, shares[0])
    linear.partial_sum(x[:, k:], w[:, k:], None, shares[1])
    preactivation(x[:, :k], w[:, :k], b).round(torch.float32).check(shares[0], "first share")
    preactivation(x, w, b).check(shares.double().sum(0), "sum")


def test_input_gradient(sizes, random):
    m, n, k = sizes
    dz, w = random(m, n), random(n, k)
    dx = linear.input_gradient(dz, w, None, None, False)
    (Tracked.of(dz) @ Tracked.of(w)).round(dz.dtype).check(dx, "dx")


@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a])
@pytest.mark.parametrize("gated", [False, True])
def test_input_gradient_through_the_activation_before(sizes, random, activation, gated):
    m, n, k = sizes
    dz, w, pre = random(m, n), random(n, k), random(m, 2 * k if gated else k)
    dx = linear.input_gradient(dz, w, pre, activation, gated)
    dh = Tracked.of(dz) @ Tracked.of(w)
    through_slope(dh, Tracked.of(pre), activation, gated).round(dz.dtype).check(dx, "dz before")


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["same", "fp32"])
def test_weight_and_bias_gradient(sizes, random, dtype):
    m, n, k = sizes
    dz, x = random(m, n), random(m, k)
    dtype = dtype or x.dtype
    dw, db = linear.weight_gradient(dz, x, True, dtype)
    (Tracked.of(dz).T @ Tracked.of(x).T.T).round(dtype).check(dw, "dW")
    Tracked.of(dz).sum().round(dtype).check(db, "db")


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["same", "fp32"])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_added_to_their_buffers_and_rounded_once(sizes, random, dtype, bias):
    m, n, k = sizes
    dz, x = random(m, n), random(m, k)
    # A bucket: both gradients inside one flat buffer, whose other elements must not change.
    flat = torch.randn(n * k + n + 8).to(dtype or x.dtype)
    before = flat.clone()
    dw, db = flat[: n * k].view(n, k), flat[n * k : n * k + n]
    linear.add_weight_gradient(dz, x, dw, db if bias else None)
    d = Tracked.of(dz)
    (d.T @ Tracked.of(x) + Tracked.of(before[: n * k].view(n, k))).round(flat.dtype).check(dw, "dW")
    if bias:
        (d.sum() + Tracked.of(before[n * k : n * k + n])).round(flat.dtype).check(db, "db")
    untouched = slice(n * k + n if bias else n * k, None)
    assert torch.equal(flat[untouched], before[untouched])


@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a])
@pytest.mark.parametrize("gated", [False, True])
def test_activation_gradient(random, activation, gated):
    m, n = 131, 67
    dy, pre = random(m, n), random(m, 2 * n if gated else n)
    dz = linear.activation_gradient(dy, pre, activation, gated)
    expected = through_slope(Tracked.of(dy), Tracked.of(pre), activation, gated)
    expected.round(dy.dtype).check(dz, "dz")


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (1, 33, 5), (33, 1, 65), (32, 32, 64), (65, 64, 1), (3, 96, 200)]
)
def test_any_size_of_one_or_more(sizes, m, n, k):
    x, w, b, dz = torch.randn(m, k), torch.randn(n, k), torch.randn(n), torch.randn(m, n)
    y, _ = linear.forward(x, w, b, None, "gelu", False, False)
    output(preactivation(x, w, b), "gelu").round(x.dtype).check(y, "y")
    dx = linear.input_gradient(dz, w, None, None, False)
    (Tracked.of(dz) @ Tracked.of(w)).round(x.dtype).check(dx, "dx")
    dw, db = linear.weight_gradient(dz, x, True, x.dtype)
    (Tracked.of(dz).T @ Tracked.of(x)).round(x.dtype).check(dw, "dW")
    Tracked.of(dz).sum().round(x.dtype).check(db, "db")


def test_operands_of_any_strides(sizes, random):
    m, n, k = sizes
    x = random(k, 2 * m)[:, ::2].T  # neither dimension contiguous
    w = random(k, n).T
    r = random(1, n).expand(m, n)
    b = random(2 * n)[::2]
    y, pre = linear.forward(x, w, b, r, "silu", False, True)
    z = preactivation(x, w, b)
    z.round(x.dtype).check(pre, "z")
    output(z, "silu", residual=r).round(x.dtype).check(y, "y")
    dz = random(1).expand(m, n)  # as the gradient of a sum is
    dw = random(k, n).T
    before = dw.clone()
    linear.add_weight_gradient(dz, x, dw, None)
    d = Tracked.of(dz)
    (d.T @ Tracked.of(x) + Tracked.of(before)).round(x.dtype).check(dw, "dW")


@pytest.mark.parametrize("stride", [(2**30 + 8, 1), (1, 2**30 + 8)], ids=["rows", "columns"])
def test_offsets_of_more_than_31_bits(sizes, stride):
    elements = 2 * (2**30 + 8) + 4096
    if torch.get_default_device().type == "cuda":
        space = torch.empty(elements, dtype=torch.float16)
    else:  # only the pages of the few elements in use are ever in memory
        pages = mmap.mmap(-1, 2 * elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        space = torch.frombuffer(pages, dtype=torch.float16, count=elements)
    x = space.as_strided((3, 3), stride)
    x.copy_(torch.randn(3, 3))
    w = torch.randn(5, 3).half()
    y, _ = linear.forward(x, w, None, None, None, False, False)
    preactivation(x.clone(), w).round(x.dtype).check(y, "y")
    before = x.clone()
    linear.add_weight_gradient(w, w, x, None)  # written at these offsets too
    grown = Tracked.of(w).T @ Tracked.of(w) + Tracked.of(before)
    grown.round(x.dtype).check(x.clone(), "x + wᵀ·w")


def test_the_same_call_gives_the_same_bits(sizes):
    m, n, k = sizes
    dz, x = torch.randn(m, n), torch.randn(m, k)
    first, second = (linear.weight_gradient(dz, x, True, x.dtype) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_not_a_number_passes_through_relu():
    x = torch.tensor([[float("nan")], [1.0], [-1.0]])
    y, _ = linear.forward(x, torch.ones(1, 1), None, None, "relu", False, False)
    assert y[0].isnan() and y[1:].flatten().tolist() == [1.0, 0.0]


class TestBf16:
    """The interpreter's, with and without the repair."""

    def product(self):
        x, w = torch.randn(40, 64).bfloat16(), torch.randn(24, 64).bfloat16()
        y, _ = linear.forward(x, w, None, None, None, False, False)
        return preactivation(x, w).round(x.dtype), y

    def test_canary_the_interpreter_still_needs_the_repair(self, interpreter):
        expected, y = self.product()
        expected.check(y, "repaired")
        assert launch.interpreter_knows_bf16()
        builder = triton_interpreter.interpreter.interpreter_builder
        builder.__class__ = triton_interpreter.InterpreterBuilder
        launch.interpreter_knows_bf16.cache_clear()
        assert not launch.interpreter_knows_bf16()
        expected, y = self.product()
        with pytest.raises(AssertionError, match="off by"):
            expected.check(y, "unrepaired")  # if right: drop the repair for this Triton

    def test_rounds_as_torch_does(self):
        bits = torch.arange(0, 2**32, 40503, dtype=torch.int64).to(torch.int32)
        numbers = bits.view(torch.float32)
        ours = torch.from_numpy(triton_interpreter.narrow(numbers.numpy()).data.view("int16"))
        theirs = numbers.bfloat16()
        number = ~numbers.isnan()
        assert torch.equal(ours.view(torch.bfloat16)[number], theirs[number])
        assert ours.view(torch.bfloat16)[~number].isnan().all()
