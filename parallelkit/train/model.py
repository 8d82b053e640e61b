"""A small GPT over bytes, in plain PyTorch: the model of the demonstration.

In the names of tensors:
    B  pieces of text in a micro-batch    L  positions    H  heads    D  width of a head
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

START = 256  # the token before a piece's first byte; tokens 0-255 are the bytes
VOCABULARY = 257
HEADS = 4
IGNORED = -100  # the target of a position beyond a piece's end


def rotate(x_BHLD: Tensor) -> Tensor:
    """Rotary position embedding: turn pair i at position l by the angle l · 10000^(-2i/D).

    Source: Su et al. 2021, RoFormer, equation 34; pairs are (i, i + D/2), as in GPT-NeoX.
    """
    length, width = x_BHLD.shape[-2:]
    # In float64, so that the fp32 model and its float64 twin see the same angles, rounded once.
    index = torch.arange(0, width, 2, device=x_BHLD.device, dtype=torch.float64)
    position = torch.arange(length, device=x_BHLD.device, dtype=torch.float64)
    angle_LD = torch.outer(position, 10000.0 ** (-index / width))
    cos, sin = angle_LD.cos().to(x_BHLD.dtype), angle_LD.sin().to(x_BHLD.dtype)
    first, second = x_BHLD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


# How `pk.tensor_parallel` splits it.
PLAN = {
    "embedding": "embedding_rowwise",
    "blocks.*.query_key_value": "packed_colwise:3",
    "blocks.*.attention_out": "rowwise",
    "blocks.*.mlp_in": "colwise",
    "blocks.*.mlp_out": "rowwise",
    "head": "colwise_gather_output",
}


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads  # and not their number: a rank may have some of them
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, width] to the same shape."""
        # Padding stands behind a piece, so the causal mask alone keeps it out of what counts.
        qkv = self.query_key_value(self.attention_norm(x))
        query, key, value = qkv.unflatten(-1, (3, -1, self.head_width)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        x = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x


class ByteGPT(nn.Module):
    """Next-byte prediction; 1.2 million parameters as it stands, the embedding tied to the head."""

    def __init__(self, width: int = 128, depth: int = 6, heads: int = HEADS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # as in GPT-2: what adds to the residual stream starts smaller
                scale = (2 * depth) ** -0.5 if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, inputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy over the targets that are not IGNORED, as their mean or "sum".

        Args:
            inputs: [B, L] int64, START and then the bytes before each target.
            targets: [B, L] int64, the bytes to predict.
        """
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction
        )
