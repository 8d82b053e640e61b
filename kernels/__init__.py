"""The linear layer's products as Triton kernels with fused epilogues.

One tiled product, out[I, J] = Σ_L a[I, L]·b[J, L], serves every direction of a layer
y[M, N] = act(x[M, K]·W[N, K]ᵀ + b) + residual, whole or one rank's shard of it:

    direction          I  J  L   a    b    also
    forward            M  N  K   x    W    bias, activation, gate, residual, pre-activation kept
    input gradient     M  K  N   dz   Wᵀ   times act'(pre) of the layer before
    weight gradient    N  K  M   dzᵀ  xᵀ   added into a gradient buffer; db is the sums of a's rows

Files, each importing only those above it:

    activations   act and act', the only place their formulas stand in Triton
    tiles         a tile of a matrix, by pointers or by descriptor (TMA)
    launch        starting a kernel: on a GPU, or through Triton's interpreter for CPU tensors
    configs       tile sizes by target and shape class
    tune          opt-in measurement of the table's alternatives, kept on disk
    product       the product kernel and its launcher
    gradient      dz = dy·act'(z) where no product comes just before
    linear        the layer's directions in terms of the two above

Importing this package imports neither Triton nor anything that needs a GPU; its modules import
torch and triton and nothing else.
"""
