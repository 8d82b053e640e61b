"""Layers split over the ranks of a group; every gradient is finished by the layer itself.

linear         column- and row-split linear layers
embedding      embeddings split by vocabulary or by feature
loss           cross entropy of split logits
functional     exchanges of activations with their conjugates; the fused linear operator
random         random numbers that differ between ranks
gradients      sums for parameters that every rank has whole
linear_op      linear layers as one operator with one derivative, mlp_op two of them
column_op      the column layer as a function, row_op the row layer
shared_input   one entry into the group for sibling layers
dtensor        weights as DTensors
split          how a tensor is cut
exchange       what travels between ranks, over sums in term
operators      operators that torch.compile does not look into; product_ops those of products
kernel_choice  who computes a product: Triton's kernels, or torch_products
"""

from __future__ import annotations

from parallelkit.nn import functional
from parallelkit.nn.dtensor import as_dtensor, install_dtensors
from parallelkit.nn.embedding import FeatureParallelEmbedding, VocabParallelEmbedding
from parallelkit.nn.gradients import sum_gradients
from parallelkit.nn.linear import ColumnParallelLinear, RowParallelLinear
from parallelkit.nn.random import split_random

__all__ = [
    "ColumnParallelLinear",
    "FeatureParallelEmbedding",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "as_dtensor",
    "functional",
    "install_dtensors",
    "split_random",
    "sum_gradients",
]
