"""The split embeddings against nn.Embedding in float64."""

import itertools

import pytest
import torch
from torch import nn

import parallelkit as pk

CASES = [(7, 4, None), (7, 4, 5), (7, 5, -7), (2, 3, None), (50, 6, 0)]  # rows, features, padding
KINDS = [pk.nn.VocabParallelEmbedding, pk.nn.FeatureParallelEmbedding]


def lookups(group):
    differences = []
    for kind, (rows, features, padding) in itertools.product(KINDS, CASES):
        torch.manual_seed(1)
        whole = nn.Embedding(rows, features, padding, dtype=torch.float64)
        split = kind.from_embedding(whole, group)
        ids = torch.randint(0, rows, (3, 8), generator=torch.Generator().manual_seed(2))
        dy = torch.randn(3, 8, features, generator=torch.Generator().manual_seed(3)).double()
        wanted, found = whole(ids), split(ids)
        wanted.backward(dy)
        found.backward(dy)
        grad = split.weight.grad
        gathered = split.weight.tp_split.gather(grad)
        differences += [
            float((found - wanted).detach().abs().max()),
            float((gathered - whole.weight.grad).abs().max()),
        ]
        differences.append(float((split.to_embedding().weight - whole.weight).abs().max()))
        assert found.shape == (3, 8, features)
        assert split(ids[:0]).shape == (0, 8, features)
    return differences


@pytest.mark.parametrize("size", [2, 4])
def test_rows_and_gradients_equal_the_whole_tables(size):
    assert max(map(max, pk.testing.run_ranks(lookups, size))) < 1e-14


def initial(group):
    pk.nn.split._CHUNK_ELEMENTS = 1000  # so that small tables are drawn in several parts
    wrong = []
    for rows, features in ((1, 3), (5, 3), (17, 16), (1003, 5)):
        torch.manual_seed(4)
        whole = nn.Embedding(rows, features, 0)
        after = torch.rand(2)
        for kind in KINDS:
            torch.manual_seed(4)
            split = kind(rows, features, 0, group=group)
            same = torch.equal(torch.rand(2), after)
            if not (same and torch.equal(split.to_embedding().weight, whole.weight)):
                wrong.append((rows, features, kind.__name__))
    return wrong


@pytest.mark.parametrize("size", [1, 4])
def test_with_one_seed_the_gathered_table_is_nn_embeddings_to_the_bit(size):
    assert pk.testing.run_ranks(initial, size) == [[]] * size


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 3.0


def scaled(group):
    torch.manual_seed(1)
    whole = Scaled(5, 4)
    split = pk.nn.VocabParallelEmbedding.from_embedding(whole, group)
    ids = torch.arange(5)
    return torch.equal(split(ids), whole(ids)), isinstance(split, Scaled)


def test_an_embedding_that_scales_still_does():
    assert pk.testing.run_ranks(scaled, 2) == [(True, True)] * 2


def out_of_range(group):
    split = pk.nn.VocabParallelEmbedding(5, 2, group=group)
    messages = []
    for bad in (5, -1):
        try:
            split(torch.tensor([0, bad]))
        except IndexError as error:
            assert isinstance(error, pk.ParallelKitError)
            messages.append(str(error))
    return messages


def test_ids_outside_the_vocabulary_are_an_error_not_zeros():
    for messages in pk.testing.run_ranks(out_of_range, 2):
        assert len(messages) == 2
        assert "[0, 5), got 5" in messages[0]
