"""The pieces of the demonstration: model, data, single-process reference, checks, picture."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch

import parallelkit as pk
from parallelkit.errors import InvalidArgumentError
from parallelkit.train import checks, data, one_process, picture, report
from parallelkit.train.command import ranks_wanted
from parallelkit.train.model import IGNORED, START, ByteGPT, rotate
from parallelkit.train.result import Result
from parallelkit.train.run import Options, prepare, train

CPU = torch.device("cpu")


def tiny_model(dtype: torch.dtype = torch.float64) -> ByteGPT:
    torch.manual_seed(1)
    return ByteGPT(width=8, depth=2, heads=2).to(dtype)


def random_pieces(count: int, seed: int = 0, longest: int = 40) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.randint(1, longest)) for _ in range(count)]


# --- model


def test_rotation_multiplies_each_pair_by_a_unit_complex_number():
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    pairs = torch.complex(x[..., :4], x[..., 4:])
    frequency = torch.tensor([10000.0 ** (-i / 4) for i in range(4)], dtype=torch.float64)
    angle = torch.arange(5, dtype=torch.float64)[:, None] * frequency
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(rotate(x), torch.cat((turned.real, turned.imag), -1))


def test_no_byte_is_predicted_from_itself_or_what_follows():
    model = tiny_model()
    [batch] = data.micro_batches([b"the same, then this"], 99, CPU)
    [other] = data.micro_batches([b"the same, then that"], 99, CPU)
    same = len(b"the same, then th")
    losses = model(batch.inputs, batch.targets, "none")
    others = model(other.inputs, other.targets, "none")
    torch.testing.assert_close(losses[:same], others[:same], rtol=0, atol=1e-14)
    assert (losses[same:] != others[same:]).all()


def test_padding_adds_nothing_to_the_loss():
    model = tiny_model()
    pieces = random_pieces(5)
    [together] = data.micro_batches(pieces, 10_000, CPU)
    alone = data.micro_batches(pieces, 1, CPU)
    assert len(alone) == 5
    torch.testing.assert_close(
        model(together.inputs, together.targets, "sum"),
        sum(model(b.inputs, b.targets, "sum") for b in alone),
    )


def test_the_model_has_1_to_5_million_parameters_and_a_tied_head():
    model = ByteGPT()
    assert 1e6 < sum(p.numel() for p in model.parameters()) < 5e6
    assert model.head.weight is model.embedding.weight


# --- data


def test_pieces_hold_every_byte_but_the_blank_lines():
    text = b"one\ntwo\n\n\n   \n" + b"x" * 600 + b"\n\nlast\n"
    pieces = data.split(text)
    assert max(map(len, pieces)) == data.CONTEXT
    assert b"".join(pieces) == b"one\ntwo" + b"x" * 600 + b"last\n"


def test_without_a_path_the_standard_library_is_read():
    pieces = data.read_pieces(None, enough=20_000, seed=0)
    assert 15_000 < sum(map(len, pieces)) <= 20_000 * 2
    assert data.read_pieces(None, enough=20_000, seed=0) == pieces
    assert data.read_pieces(None, enough=20_000, seed=1) != pieces


def test_a_folder_is_read_without_its_hidden_and_binary_files(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a.txt").write_text("some text")
    (tmp_path / "b.md").write_text("more text")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    pieces = data.read_pieces(tmp_path, enough=1000, seed=0)
    assert sorted(pieces) == [b"more text", b"some text"]


def test_a_character_cut_where_reading_stops_is_no_fault(tmp_path):
    (tmp_path / "a.txt").write_text("äö")
    assert data.read_pieces(tmp_path / "a.txt", enough=3, seed=0) == ["äö".encode()[:3]]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b" \n\n\t\n", "is empty"),
        (b"text\0more", "got byte 0x00 at offset 4"),
        (b"caf\xe9 au lait", "got byte 0xe9 at offset 3"),
    ],
)
def test_a_file_without_text_is_named_with_what_is_wrong(tmp_path, content, complaint):
    file = tmp_path / "a.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=complaint) as raised:
        data.read_pieces(file, enough=1000, seed=0)
    assert str(file) in str(raised.value)


def test_a_folder_without_text_is_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"\0")
    with pytest.raises(InvalidArgumentError, match=f"{tmp_path} must hold text, got 2 files"):
        data.read_pieces(tmp_path, enough=1000, seed=0)


def test_no_piece_comes_again_before_all_have_come():
    pieces = [bytes([i]) for i in range(7)]
    drawn = [p for batch in data.global_batches(pieces, 3, 7, seed=5) for p in batch]
    assert len(drawn) == 21
    for epoch in (drawn[:7], drawn[7:14], drawn[14:]):
        assert sorted(epoch) == pieces
    assert drawn == [p for batch in data.global_batches(pieces, 3, 7, seed=5) for p in batch]


@pytest.mark.parametrize("limit", [1, 40, 64, 1000])
def test_micro_batches_hold_each_piece_once_within_the_limit(limit):
    pieces = random_pieces(11)
    batches = data.micro_batches(pieces, limit, CPU)
    found = []
    for batch in batches:
        assert batch.inputs.numel() <= limit or len(batch.inputs) == 1
        assert batch.tokens == (batch.targets != IGNORED).sum()
        for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            piece = [t for t in targets if t != IGNORED]
            assert inputs[: len(piece)] == [START, *piece[:-1]]
            found.append(bytes(piece))
    assert sorted(found) == sorted(pieces)


def options(tmp_path: Path, **changed: object) -> Options:
    values = dict(
        data=None, steps=2, batch=4, micro_batch=64, lr=1e-3, seed=0, device="cpu", out=tmp_path,
        save_every=10,
    )  # fmt: skip
    return Options(**(values | changed))


def test_too_few_pieces_for_the_ranks_are_refused(tmp_path):
    (tmp_path / "line.txt").write_text("one line of text\n")
    one_line = options(tmp_path, data=tmp_path / "line.txt")
    assert prepare(one_line, size=1) == [b"one line of text\n"]
    with pytest.raises(InvalidArgumentError, match="each of the 3 ranks, got 1; give more text"):
        prepare(one_line, size=3)
    with pytest.raises(InvalidArgumentError, match="--batch must give each of the 5 ranks"):
        prepare(options(tmp_path), size=5)


def test_an_output_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgumentError, match="--out .*file must be a folder"):
        prepare(options(tmp_path, out=tmp_path / "file"), size=1)


# --- the single process


@pytest.mark.parametrize("limit", [1, 50, 10_000])
def test_one_process_has_the_gradient_of_the_mean_over_all_tokens(limit):
    model, pieces = tiny_model(), random_pieces(6)
    [whole] = data.micro_batches(pieces, 10_000, CPU)
    loss = model(whole.inputs, whole.targets)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    batches = data.micro_batches(pieces, limit, CPU)
    found = one_process.backward(model, one_process.mean_over_tokens(batches))
    assert found == pytest.approx(loss.item(), rel=1e-13)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-14)


def test_the_mean_of_means_counts_ranks_and_micro_batches_alike():
    shares = [data.micro_batches(random_pieces(n, seed=n), 1, CPU) for n in (1, 3)]
    factors = [factor for _, factor in one_process.mean_of_means(shares)]
    assert factors == [1 / 2, 1 / 6, 1 / 6, 1 / 6]


# --- checks


@pytest.fixture
def checked():
    """An fp32 model, its checker, and a batch: whole, and cut for two ranks."""
    model = tiny_model(torch.float32)
    pieces = random_pieces(9)
    whole = data.micro_batches(pieces, 64, CPU)
    shares = [data.micro_batches(pieces[rank::2], 32, CPU) for rank in range(2)]
    return model, checks.GradientChecker(model, seed=0), whole, shares


@pytest.mark.parametrize("limit", [1, 20, 500])
def test_right_gradients_pass_however_the_batch_is_cut(checked, limit):
    model, checker, whole, shares = checked
    cut = data.micro_batches(random_pieces(9), limit, CPU)
    one_process.backward(model, one_process.mean_over_tokens(cut))
    row = checker.check(model, 3, whole, shares)
    assert row.ok and row.step == 3
    assert 0 < row.error < row.bound < 1e-3 < row.plain_error


def plain_mean(model, shares):
    one_process.backward(model, one_process.mean_of_means(shares))


def sum_without_averaging(model, shares):
    for parameter in model.parameters():
        parameter.grad *= 2


def one_tensor_slightly_off(model, shares):
    model.blocks[1].mlp_norm.weight.grad *= 1 + 1e-4


def one_gradient_missing(model, shares):
    model.norm.weight.grad = None


def one_nan(model, shares):
    model.embedding.weight.grad[7, 3] = math.nan


@pytest.mark.parametrize(
    "fault",
    [plain_mean, sum_without_averaging, one_tensor_slightly_off, one_gradient_missing, one_nan],
)
def test_wrong_gradients_fail(checked, fault):
    model, checker, whole, shares = checked
    one_process.backward(model, one_process.mean_over_tokens(whole))
    fault(model, shares)
    assert not checker.check(model, 0, whole, shares).ok


def test_a_check_leaves_the_model_as_it_was(checked):
    model, checker, whole, shares = checked
    one_process.backward(model, one_process.mean_over_tokens(whole))
    before = checks.digest(model), checks.gradients(model)
    checker.check(model, 0, whole, shares)
    assert checks.digest(model) == before[0]
    for name, gradient in checks.gradients(model).items():
        assert torch.equal(gradient, before[1][name])


def test_a_digest_tells_one_bit():
    model = tiny_model(torch.float32)
    before = checks.digest(model)
    with torch.no_grad():
        weight = model.blocks[0].mlp_in.weight.view(-1)
        kept = weight[5].clone()
        weight[5] = torch.nextafter(kept, torch.tensor(math.inf))
        assert checks.digest(model) != before
        weight[5] = kept
    assert checks.digest(model) == before


def test_one_rounding_moves_every_parameter_to_a_neighbour():
    model = tiny_model(torch.float32)
    before = [p.clone() for p in model.parameters()]
    checks.move_by_one_rounding(model, torch.Generator().manual_seed(0))
    for old, new in zip(before, model.parameters(), strict=True):
        up = torch.nextafter(old, torch.tensor(math.inf))
        down = torch.nextafter(old, torch.tensor(-math.inf))
        assert ((new == up) | (new == down)).all()


# --- the run, with faults


def train_with(group: pk.Group, options: Options, fault: str) -> Result:
    """A run of two ranks whose parallelkit has a fault."""
    right = pk.DataParallel.backward
    if fault == "weights ignored":
        pk.DataParallel.backward = lambda self, loss, weight, sync: right(self, loss, 1, sync=sync)
    elif fault == "last micro-batch lost":
        pk.DataParallel.backward = lambda self, loss, weight, sync: right(
            self, None if sync else loss, 0 if sync else weight, sync=sync
        )
    elif fault == "one rank steps further" and group.rank == 1:
        step = pk.ShardedAdamW.step

        def step_further(self):
            step(self)
            self.param_groups[0]["params"][-1].data.mul_(1 + 1e-6)

        pk.ShardedAdamW.step = step_further
    return train(options, group)


@pytest.mark.parametrize(
    ("fault", "gradients_ok", "replicas_ok"),
    [
        ("none", True, True),
        ("weights ignored", False, True),
        ("last micro-batch lost", False, True),
        ("one rank steps further", True, False),
    ],
)
def test_a_run_finds_the_fault_in_it(tmp_path, fault, gradients_ok, replicas_ok):
    quick = options(tmp_path, steps=2, batch=5, micro_batch=256)
    found, of_rank_1 = pk.testing.run_ranks(train_with, 2, quick, fault)
    assert (found.gradients_ok, found.replicas_ok) == (gradients_ok, replicas_ok)
    assert found.losses["parallel"] == of_rank_1.losses["parallel"]
    assert found.losses["parallel"][0] == pytest.approx(found.losses["one process"][0], rel=1e-6)
    assert all(len(losses) == 2 for losses in found.losses.values())
    assert found.tokens == of_rank_1.tokens


def train_split(group: pk.Group, options: Options) -> Result:
    return train(options, group)


def test_layers_split_over_the_ranks_pass_the_same_checks(tmp_path):
    quick = options(tmp_path, steps=2, batch=3, micro_batch=256, tp=2)
    found = pk.testing.run_ranks(train_split, 2, quick)[0]
    assert found.ok
    assert found.losses["parallel"] == pytest.approx(found.losses["one process"], rel=1e-5)
    assert found.gradient_bytes < 0.6 * 4 * found.parameters


@pytest.mark.parametrize(
    ("nproc", "dp", "tp", "size"),
    [(None, None, 1, 2), (3, None, 1, 3), (None, None, 4, 4), (None, 2, 2, 4), (4, 2, 2, 4)],
)
def test_the_options_say_how_many_ranks_there_are(nproc, dp, tp, size):
    assert ranks_wanted(nproc, dp, tp) == size


def test_ranks_that_the_split_does_not_divide_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--tp must divide the 3 ranks"):
        prepare(options(tmp_path, tp=2), 3)
    with pytest.raises(ValueError, match="--nproc must be --dp times --tp, 4, got 3"):
        ranks_wanted(3, 2, 2)


# --- what is shown


def result(**changed: object) -> Result:
    values = dict(
        size=2,
        transport="shared-memory",
        parameters=1_200_000,
        gradient_bytes=4_800_000,
        losses={"parallel": [5.5, 5.0], "one process": [5.5, 5.0], "plain mean": [5.5, 5.1]},
        tokens=[[30, 70], [55, 45]],
        seconds=[9.0, 0.5],
        checks=[checks.GradientCheck(0, "norm.weight", 1e-7, 1e-5, 0.1)],
        digests=["ab" * 32] * 2,
    )
    return Result(**(values | changed))


def test_speed_leaves_out_the_first_step_and_bytes_follow_the_ring():
    assert result().tokens_per_second == 200
    assert result(tokens=[[30, 70]], seconds=[0.5]).tokens_per_second == 200
    assert result().bytes_per_step == 7_200_000
    assert result(size=4).bytes_per_step == 10_800_000
    assert result(size=1).bytes_per_step == 0


def test_a_failed_check_fails_the_result_and_shows_in_the_table():
    assert result().ok
    assert "FAILED" not in report.table(result())
    nan = checks.GradientCheck(0, "head", math.nan, 1e-5, 0.1)
    for bad in (result(checks=[*result().checks, nan]), result(digests=["ab" * 32, "cd" * 32])):
        assert not bad.ok
        assert report.table(bad).count("FAILED") == 1


def test_picture_and_numbers_are_written(tmp_path):
    picture.draw(result(), tmp_path / "train.png")
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")
    report.write_json(options(tmp_path), result(), tmp_path / "train.json")
    numbers = json.loads((tmp_path / "train.json").read_text())
    assert numbers["losses"] == result().losses
    assert numbers["gradients_ok"] is True
    assert numbers["options"]["out"] == str(tmp_path)
