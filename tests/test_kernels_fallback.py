"""Plain PyTorch where there is no GPU, and its one exception: 16-bit products by blocks in fp32."""

from contextlib import nullcontext

import pytest
import torch
from kernels_oracle import Tracked, output, preactivation, through_slope
from torch.utils._python_dispatch import TorchDispatchMode

from parallelkit.nn import torch_products

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of PyTorch's own switch
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(params=["native", "blocks"])
def small_blocks(request, monkeypatch):
    """As this CPU has it, or as one without 16-bit instructions would; with blocks that split."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch_products, "BLOCK_I", 16)
    monkeypatch.setattr(torch_products, "BLOCK_J", 24)
    monkeypatch.setattr(torch_products, "BLOCK_L", 32)
    monkeypatch.setattr(torch_products, "BLOCK_ELEMENTS", 128)
    with no_16_bit_instructions() if request.param == "blocks" else nullcontext():
        yield request.param


def no_16_bit_instructions():
    # Turns off both what PyTorch would multiply 16 bits with and what says that it can.
    return torch.backends.mkldnn.flags(enabled=False)


def random(*shape, dtype=BF16):
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_forward(small_blocks, dtype, gated):
    width = 2 * 53 if gated else 53
    x, w, b, r = random(37, 70), random(width, 70), random(width), random(37, 53)
    x, w, b, r = (t.to(dtype) for t in (x, w, b, r))
    y, pre = torch_products.forward(x, w, b, r, "silu", gated, True)
    z = preactivation(x, w, b)
    z.round(dtype).check(pre, "z")
    # By blocks a single rounding lies between the operands and y; the native product rounds z.
    z = z if small_blocks == "blocks" or dtype == FP16 else z.round(dtype)
    output(z, "silu", gated=gated, residual=r).round(dtype).check(y, "y")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_input_gradient(small_blocks, gated, activation):
    dz, w, pre = random(37, 53), random(53, 70), random(37, 140 if gated else 70)
    if activation is None:
        pre, gated = None, False
    dx = torch_products.input_gradient(dz, w, pre, activation, gated)
    expected = Tracked.of(dz) @ Tracked.of(w)
    if activation:
        expected = through_slope(expected.round(BF16), Tracked.of(pre), activation, gated)
    expected.round(BF16).check(dx, "dx")


@pytest.mark.parametrize("buffer", [BF16, FP32], ids=str)
def test_weight_gradients_new_and_added(small_blocks, buffer):
    dz, x, grad, bias_grad = random(37, 53), random(37, 70), torch.randn(53, 70), torch.randn(53)
    grad, bias_grad = grad.to(buffer), bias_grad.to(buffer)
    d, before = Tracked.of(dz), (Tracked.of(grad.clone()), Tracked.of(bias_grad.clone()))
    dw, db = torch_products.weight_gradient(dz, x, True, buffer)
    (d.T @ Tracked.of(x)).round(buffer).check(dw, "dW")
    d.sum().round(buffer).check(db, "db")
    torch_products.add_weight_gradient(dz, x, grad, bias_grad)
    (d.T @ Tracked.of(x) + before[0]).round(buffer).check(grad, "dW + grad")
    (d.sum() + before[1]).round(buffer).check(bias_grad, "db + grad")


def test_partial_sums_of_16_bit_operands_are_fp32_throughout(small_blocks):
    x, w, b, out = random(37, 70), random(53, 70), random(53), torch.full((37, 53), torch.nan)
    torch_products.partial_sum(x, w, b, out)
    preactivation(x, w, b).round(FP32).check(out, "share")


class Watched(TorchDispatchMode):
    """Notes the largest fp32 tensor that any operator gives, and each product of 16-bit numbers."""

    elements, slow_products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == FP32:
            self.elements = max(self.elements, result.untyped_storage().nbytes() // 4)
        if func.__name__.partition(".")[0] in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv"):
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            self.slow_products += any(tensor.dtype in (BF16, FP16) for tensor in tensors)
        return result


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_no_product_is_left_to_16_bits_and_no_matrix_is_ever_converted_whole(dtype):
    """PyTorch's own products of 16 bits take 5 to 50 times as long where the CPU has none."""
    x, w = random(600, 1100, dtype=dtype), random(1300, 1100, dtype=dtype)
    with no_16_bit_instructions(), Watched() as seen:
        y, _ = torch_products.forward(x, w, None, None, "gelu", False, False)
        torch_products.input_gradient(y, w, None, None, False)
        torch_products.weight_gradient(y, x, True, dtype)
    smallest_matrix = min(x.numel(), w.numel(), y.numel())
    assert 0 < seen.elements <= 512 * 1024 < smallest_matrix
    assert seen.slow_products == 0
    with no_16_bit_instructions(), Watched() as seen:
        torch.mm(x, w.T)
    assert seen.slow_products == 1, "it would be seen"


def test_one_row_longer_than_a_block(monkeypatch):
    monkeypatch.setattr(torch_products, "BLOCK_ELEMENTS", 4)
    x, w, r = random(3, 8), random(16, 8), random(3, 16)
    y, _ = torch_products.forward(x, w, None, r, "relu", False, False)
    output(preactivation(x, w).round(BF16), "relu", residual=r).round(BF16).check(y, "y")
