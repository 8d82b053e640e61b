"""dz = dy·act'(z), for a dy that no product of ours has just made.

Where one has, its epilogue does this (`SLOPE` in product.py). Folding it into the loads of the two
products that read dz instead would repeat it for every tile across: about 16 times at a width of
4096, some 400 instructions an element against 6 bytes of memory traffic.
"""

import torch
import triton
import triton.language as tl
from parallelkit.kernels import configs, launch
from parallelkit.kernels.activations import activate, slope
from parallelkit.kernels.tiles import load_tile, store_tile

BLOCK_M, BLOCK_N = 8, 128
INTERPRETED_BLOCK = 128  # the interpreter's time goes by tiles, not by elements


@triton.jit
def activation_gradient_kernel(  # noqa: D103 (the file's docstring is its)
    dy,  # [M, N] in
    pre,  # [M, N] in: act's argument
    pre_up,  # [M, N] in: what act(pre) was multiplied by, in gated layers; else None
    dz,  # [M, N] out
    dz_up,  # [M, N] out: the gradient of pre_up, or None
    M, N,
    stride_ym, stride_yn, stride_pm, stride_pn, stride_zm, stride_zn,
    ACTIVATION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tiles_n = (N + BN - 1) // BN
    m0 = tl.program_id(0) // tiles_n * BM
    n0 = tl.program_id(0) % tiles_n * BN
    d = load_tile(dy, m0, n0, M, N, stride_ym, stride_yn, BM, BN, False, False).to(tl.float32)
    z = load_tile(pre, m0, n0, M, N, stride_pm, stride_pn, BM, BN, False, False).to(tl.float32)
    if pre_up is not None:
        up = load_tile(pre_up, m0, n0, M, N, stride_pm, stride_pn, BM, BN, False, False)
        d_up = d * activate(z, ACTIVATION)
        store_tile(dz_up, d_up, m0, n0, M, N, stride_zm, stride_zn, BM, BN, False)
        d *= up.to(tl.float32)
    d *= slope(z, ACTIVATION)
    store_tile(dz, d, m0, n0, M, N, stride_zm, stride_zn, BM, BN, False)


def activation_gradient(
    dy: torch.Tensor,
    pre: torch.Tensor,
    dz: torch.Tensor,
    activation: str,
    *,
    pre_up: torch.Tensor | None = None,
    dz_up: torch.Tensor | None = None,
) -> None:
    """Launch it on tensors of any strides; the two halves of a pair have equal ones."""
    M, N = dy.shape
    interpreted = configs.target(dy.device) == "interpreter"
    bm, bn = (INTERPRETED_BLOCK, INTERPRETED_BLOCK) if interpreted else (BLOCK_M, BLOCK_N)
    launch.run(
        activation_gradient_kernel,
        triton.cdiv(M, bm) * triton.cdiv(N, bn),
        dy.device,
        num_warps=4,
        dy=dy, pre=pre, pre_up=pre_up, dz=dz, dz_up=dz_up,
        M=M, N=N,
        stride_ym=dy.stride(0), stride_yn=dy.stride(1),
        stride_pm=pre.stride(0), stride_pn=pre.stride(1),
        stride_zm=dz.stride(0), stride_zn=dz.stride(1),
        ACTIVATION=activation,
        BM=bm, BN=bn,
    )  # fmt: skip
