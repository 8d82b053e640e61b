"""out[I, J] = epilogue(Σ_L a[I, L]·b[J, L]): the one product behind every direction of the layer.

    I, J   rows and columns of the result        L   the length summed over
    i0, j0, l0   where the tile at hand starts   BI, BJ, BL   its size

Programs are persistent: each walks over tiles of the result, so that the loads of its next tile
start under the epilogue of the last. Sums are in fp32, in an order fixed by the tile sizes, without
atomics; each output is rounded once.
"""

import torch
import triton
import triton.language as tl
from parallelkit.kernels import launch
from parallelkit.kernels.activations import activate, slope
from parallelkit.kernels.configs import Config, programs
from parallelkit.kernels.tiles import describable, describe, load_tile, store_tile


@triton.jit
def tile_start(tile, I, J, BI: tl.constexpr, BJ: tl.constexpr, GROUP: tl.constexpr):
    """Where a tile lies: down GROUP rows of tiles, then right, so that operands stay in L2."""
    rows = (I + BI - 1) // BI
    columns = (J + BJ - 1) // BJ
    first = tile // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    within = tile % (GROUP * columns)
    return (first + within % height) * BI, (within // height) * BJ


@triton.jit
def columns_of(x, PART: tl.constexpr, PARTS: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr):
    """One of 1 or 2 equal ranges of columns of x[BI, BJ]."""
    if PARTS == 2:
        left, right = x.reshape(BI, 2, BJ // 2).permute(0, 2, 1).split()
        x = left if PART == 0 else right
    return x


@triton.jit
def product_kernel(  # noqa: D103 (the file's docstring is its)
    a,  # [I, L] in
    b,  # [J, L] in
    b_up,  # [J, L] in: the second half of a gated layer's weight; else None
    out,  # [I, J] out, of any float dtype
    out_up,  # [I, J] out: the gradient of a gated layer's second half; else None
    pre,  # [I, J] act's argument: out of a forward product, in where SLOPE; or None
    pre_up,  # [I, J] what act(pre) is multiplied by, in gated layers; else None
    bias,  # [J] in, or None
    bias_up,  # [J] in: bias of the second half; else None
    residual,  # [I, J] in, added last, or None
    sums,  # [I] out: Σ_L a, or None
    I, J, L,
    stride_ai, stride_al, stride_bj, stride_bl, stride_oi, stride_oj,
    stride_pi, stride_pj, stride_ri, stride_rj, stride_s,
    ACTIVATION: tl.constexpr,  # name or None
    SLOPE: tl.constexpr,  # multiply by act'(pre), instead of applying act
    ACCUMULATE: tl.constexpr,  # add to out and sums what is there already
    PRECISION: tl.constexpr,  # of fp32 operands: "ieee" or "tf32"
    BI: tl.constexpr, BJ: tl.constexpr, BL: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,  # the epilogue takes the tile's columns in 1 or 2 parts: fewer registers
    LOADS: tl.constexpr,  # operands by descriptor
    STORES: tl.constexpr,  # the epilogue's matrices by descriptor
    A_T: tl.constexpr, B_T: tl.constexpr,  # by descriptor: a, b are contiguous along I, J, not L
    FLATTEN: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):  # fmt: skip
    PJ: tl.constexpr = BJ // PARTS
    dtype = a.dtype.element_ty
    if LOADS:
        a = describe(a, I, L, stride_ai, stride_al, BI, BL, A_T)
        b = describe(b, J, L, stride_bj, stride_bl, BJ, BL, B_T)
        if b_up is not None:
            b_up = describe(b_up, J, L, stride_bj, stride_bl, BJ, BL, B_T)
    if STORES:
        out = describe(out, I, J, stride_oi, stride_oj, BI, PJ, False)
        if out_up is not None:
            out_up = describe(out_up, I, J, stride_oi, stride_oj, BI, PJ, False)
        if pre is not None:
            pre = describe(pre, I, J, stride_pi, stride_pj, BI, PJ, False)
        if pre_up is not None:
            pre_up = describe(pre_up, I, J, stride_pi, stride_pj, BI, PJ, False)
        if residual is not None:
            residual = describe(residual, I, J, stride_ri, stride_rj, BI, PJ, False)

    count = ((I + BI - 1) // BI) * ((J + BJ - 1) // BJ)
    for tile in tl.range(
        tl.program_id(0), count, tl.num_programs(0), flatten=FLATTEN, warp_specialize=SPECIALIZE
    ):
        i0, j0 = tile_start(tile, I, J, BI, BJ, GROUP)
        total = tl.full((BI, BJ), 0.0, tl.float32)
        total_up = total
        ones = tl.full((BL, 16), 1.0, tl.float32).to(dtype)
        row_sums = tl.full((BI, 16), 0.0, tl.float32)
        for l0 in range(0, L, BL):
            a_tile = load_tile(a, i0, l0, I, L, stride_ai, stride_al, BI, BL, LOADS, A_T)
            b_tile = load_tile(b, j0, l0, J, L, stride_bj, stride_bl, BJ, BL, LOADS, B_T)
            total = tl.dot(a_tile, b_tile.T, total, input_precision=PRECISION)
            if b_up is not None:
                b_tile = load_tile(b_up, j0, l0, J, L, stride_bj, stride_bl, BJ, BL, LOADS, B_T)
                total_up = tl.dot(a_tile, b_tile.T, total_up, input_precision=PRECISION)
            if sums is not None:  # noqa: SIM102 (one condition is the compiler's, one the GPU's)
                # By the tensor cores too (16 columns is their least), from the tile already in
                # shared memory; only the first tile of each row of tiles pays for it.
                if j0 == 0:
                    row_sums = tl.dot(a_tile, ones, row_sums, input_precision="ieee")

        for part in tl.static_range(PARTS):
            p0 = j0 + part * PJ
            j = p0 + tl.arange(0, PJ)
            value = columns_of(total, part, PARTS, BI, BJ)
            if SLOPE:
                z = load_tile(pre, i0, p0, I, J, stride_pi, stride_pj, BI, PJ, STORES, False)
                z = z.to(tl.float32)
                if out_up is not None:
                    up = load_tile(
                        pre_up, i0, p0, I, J, stride_pi, stride_pj, BI, PJ, STORES, False
                    )
                    value_up = value * activate(z, ACTIVATION)
                    store_tile(out_up, value_up, i0, p0, I, J, stride_oi, stride_oj, BI, PJ, STORES)
                    value *= up.to(tl.float32)
                value *= slope(z, ACTIVATION)
            else:
                if bias is not None:
                    value += tl.load(bias + j, mask=j < J, other=0.0).to(tl.float32)[None, :]
                if pre is not None:
                    store_tile(pre, value, i0, p0, I, J, stride_pi, stride_pj, BI, PJ, STORES)
                value = activate(value, ACTIVATION)
                if b_up is not None:
                    up = columns_of(total_up, part, PARTS, BI, BJ)
                    if bias_up is not None:
                        up += tl.load(bias_up + j, mask=j < J, other=0.0).to(tl.float32)[None, :]
                    if pre_up is not None:
                        store_tile(pre_up, up, i0, p0, I, J, stride_pi, stride_pj, BI, PJ, STORES)
                    value *= up
            if residual is not None:
                there = load_tile(
                    residual, i0, p0, I, J, stride_ri, stride_rj, BI, PJ, STORES, False
                )
                value += there.to(tl.float32)
            if ACCUMULATE:
                there = load_tile(out, i0, p0, I, J, stride_oi, stride_oj, BI, PJ, STORES, False)
                value += there.to(tl.float32)
            store_tile(out, value, i0, p0, I, J, stride_oi, stride_oj, BI, PJ, STORES)

        if sums is not None:
            i = i0 + tl.arange(0, BI)
            column = tl.arange(0, 16)
            where = (sums + i.to(tl.int64) * stride_s)[:, None] + column[None, :]
            once = (i < I)[:, None] & (column == 0)[None, :] & (j0 == 0)
            if ACCUMULATE:
                row_sums += tl.load(where, mask=once, other=0.0).to(tl.float32)
            tl.store(where, row_sums.to(sums.dtype.element_ty), mask=once)


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    config: Config,
    *,
    b_up: torch.Tensor | None = None,
    out_up: torch.Tensor | None = None,
    pre: torch.Tensor | None = None,
    pre_up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
    activation: str | None = None,
    slope: bool = False,
    accumulate: bool = False,
    tf32: bool = False,
) -> None:
    """Launch the product on tensors of any strides; see the kernel's arguments.

    The two halves of a pair (b and b_up, out and out_up, ...) have equal strides. Nothing is
    checked here and empty results are the caller's: `linear` is the place for both.
    """
    (I, L), J = a.shape, b.shape[0]
    a_t, b_t = (not describable(t) and describable(t.T) for t in (a, b))
    loads = [a.T if a_t else a, *(t.T if b_t else t for t in (b, b_up) if t is not None)]
    stores = [t for t in (out, out_up, pre, pre_up, residual) if t is not None]
    launch.run(
        product_kernel,
        programs(config, I, J, a.device),
        a.device,
        num_warps=config.warps,
        num_stages=config.stages,
        a=a, b=b, b_up=b_up, out=out, out_up=out_up, pre=pre, pre_up=pre_up,
        bias=bias, bias_up=bias_up, residual=residual, sums=sums,
        I=I, J=J, L=L,
        stride_ai=a.stride(0), stride_al=a.stride(1),
        stride_bj=b.stride(0), stride_bl=b.stride(1),
        stride_oi=out.stride(0), stride_oj=out.stride(1),
        stride_pi=pre.stride(0) if pre is not None else 0,
        stride_pj=pre.stride(1) if pre is not None else 0,
        stride_ri=residual.stride(0) if residual is not None else 0,
        stride_rj=residual.stride(1) if residual is not None else 0,
        stride_s=sums.stride(0) if sums is not None else 0,
        ACTIVATION=activation, SLOPE=slope, ACCUMULATE=accumulate,
        PRECISION="tf32" if tf32 else "ieee",
        BI=config.block_i, BJ=config.block_j, BL=config.block_l,
        GROUP=config.group, PARTS=config.parts,
        LOADS=config.descriptors and all(map(describable, loads)),
        # A tile of out is read right before it is overwritten: by pointers, or a whole tile of it
        # would lie in shared memory twice.
        STORES=config.descriptors and not accumulate and all(map(describable, stores)),
        A_T=a_t, B_T=b_t,
        FLATTEN=config.flatten, SPECIALIZE=config.specialize,
    )  # fmt: skip
