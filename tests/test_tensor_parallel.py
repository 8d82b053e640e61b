"""`pk.tensor_parallel` on plain modules, and what split training costs and keeps."""

import copy
import ctypes
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import parallelkit as pk

HIDDEN, HEADS = 8, 4


def random(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Block(nn.Module):
    """Norm, two projections that read it, their product, and back; twice, with a residual."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.gate, self.up = nn.Linear(HIDDEN, 6), nn.Linear(HIDDEN, 6)
        self.down = nn.Linear(6, HIDDEN)
        self.first, self.second = nn.Linear(HIDDEN, 5), nn.Linear(5, HIDDEN)

    def forward(self, x):
        y = self.norms[0](x)
        x = x + self.down(torch.sigmoid(self.gate(y)) * self.up(y))
        return x + self.second(torch.tanh(self.first(self.norms[1](x))))


PLAN = {
    "gate": "colwise",
    "up": "colwise",
    "down": "rowwise",
    "*st": "colwise",
    "second": "rowwise",
}


def block():
    torch.manual_seed(0)
    return Block().double()


def part(x, group, dim):
    return x.narrow(
        dim, *(lambda a, b: (a, b - a))(*pk.shard_bounds(x.shape[dim], group.size, group.rank))
    )


def train(group, sequence):
    """Largest differences after ten steps, and whether replicated parameters have equal bits."""
    whole = block()
    split = pk.tensor_parallel(copy.deepcopy(whole), group, PLAN, sequence_parallel=sequence)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (whole, split)]
    worst = 0.0
    for step in range(10):
        x, dy = random(step, 2, 7, HIDDEN), random(100 + step, 2, 7, HIDDEN)
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole(x).backward(dy)
        if sequence:
            split(part(x, group, -2)).backward(part(dy, group, -2))
        else:
            split(x).backward(dy)
        gradients = pk.gather_gradients(split)
        for name, parameter in whole.named_parameters():
            worst = max(worst, float((gradients[name] - parameter.grad).abs().max()))
        for optimizer in optimizers:
            optimizer.step()
    state = pk.gather_state_dict(split)
    for name, tensor in whole.state_dict().items():
        worst = max(worst, float((state[name] - tensor).abs().max()))
    bits = [p.detach().numpy().tobytes() for p in split.parameters() if not hasattr(p, "tp_group")]
    return worst, bits


@pytest.mark.parametrize(("size", "sequence"), [(2, False), (2, True), (3, True)])
def test_ten_steps_equal_the_unsplit_module_and_replicas_stay_equal_to_the_bit(size, sequence):
    results = pk.testing.run_ranks(train, size, sequence)
    assert max(worst for worst, _ in results) < 1e-12
    assert all(bits == results[0][1] for _, bits in results)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.middle(self.embed(ids))))


def tied(group, plan):
    torch.manual_seed(1)
    whole = Tied().double()
    split = pk.tensor_parallel(copy.deepcopy(whole), group, plan)
    ids, dy = torch.tensor([[0, 3, 10, 3]]), random(2, 1, 4, 11)
    wanted, found = whole(ids), split(ids)
    wanted.backward(dy)
    found.backward(dy)
    gradient = pk.gather_gradients(split)["embed.weight"]
    return (
        split.head.weight is split.embed.weight,
        split.embed.weight.shape[0]
        == len(range(11)[slice(*pk.shard_bounds(11, group.size, group.rank))]),
        float((found - wanted).detach().abs().max()),
        float((gradient - whole.embed.weight.grad).abs().max()),
    )


@pytest.mark.parametrize("name", ["embed", "head"])
def test_a_tied_weight_is_split_with_its_partner_and_has_one_gradient(name):
    style = "embedding_rowwise" if name == "embed" else "colwise_gather_output"
    for same, cut, value, gradient in pk.testing.run_ranks(tied, 2, {name: style}):
        assert same
        assert cut
        assert value < 1e-13
        assert gradient < 1e-13


STYLES = {
    "packed": ({"a": "packed_colwise", "b": "packed_rowwise"}, 12),
    "gathered": ({"a": "colwise_gather_output", "b": "rowwise_split_input"}, 7),
    "old names": ({"a": "colwise_rep", "b": "rowwise_rep"}, 7),
    "replicated": ({"a": "replicate", "b": "colwise_gather_output"}, 7),
    "embedding": ({"e": "colwise", "b": "colwise_gather_output"}, 7),
}


class Pair(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.e, self.a, self.b = nn.Embedding(5, 4), nn.Linear(4, inner), nn.Linear(inner, 4)

    def forward(self, ids):
        return self.b(torch.tanh(self.a(self.e(ids))))


def every_style(group):
    differences = {}
    for name, (plan, inner) in STYLES.items():
        torch.manual_seed(3)
        whole = Pair(inner).double()
        split = pk.tensor_parallel(copy.deepcopy(whole), group, plan)
        ids, dy = torch.tensor([4, 0, 1, 1, 2]), random(3, 5, 4)
        wanted, found = whole(ids), split(ids)
        wanted.backward(dy)
        found.backward(dy)
        gradients = pk.gather_gradients(split)
        differences[name] = max(
            float((found - wanted).detach().abs().max()),
            *(float((gradients[n] - p.grad).abs().max()) for n, p in whole.named_parameters()),
        )
        state = pk.gather_state_dict(split)
        assert all(torch.equal(state[n], t) for n, t in whole.state_dict().items()), name
    return differences


def test_every_style_of_a_plan_gives_the_unsplit_numbers():
    for differences in pk.testing.run_ranks(every_style, 2):
        for name, difference in differences.items():
            assert difference < 1e-13, (name, difference)


def record(group):
    """What the group's transport moves from now on: (operation, bytes of the whole)."""
    moved, transport = [], group._transport

    class Recorder:
        def __getattr__(self, name):
            return getattr(transport, name)

        def prepare(self, tensors):
            return sum(t.nbytes for t in tensors), transport.prepare(tensors)

    for operation in ("all_reduce", "start_all_reduce", "reduce_scatter", "all_gather"):

        def run(self, prepared, *rest, operation=operation):
            moved.append((operation.removeprefix("start_"), prepared[0]))
            return getattr(transport, operation)(prepared[1], *rest)

        setattr(Recorder, operation, run)
    group._transport = Recorder()
    return moved


def block_traffic(group, sequence):
    moved = record(group)
    split = pk.tensor_parallel(block(), group, PLAN, sequence_parallel=sequence)
    x = random(1, 3, 4, HIDDEN)
    x = (part(x, group, -2) if sequence else x).requires_grad_()
    moved.clear()
    y = split(x)
    forward = list(moved)
    moved.clear()
    y.sum().backward()
    return forward, [each for each in moved if each[1] >= 3 * 4 * HIDDEN * 8]


def test_a_block_costs_two_sums_of_the_activation_each_way():
    activation = 3 * 4 * HIDDEN * 8
    for forward, backward in pk.testing.run_ranks(block_traffic, 2, False):
        assert forward == [("all_reduce", activation)] * 2
        assert backward == [("all_reduce", activation)] * 2


def test_with_sequence_parallelism_a_gather_and_a_reduce_scatter_take_the_place_of_each_sum():
    activation = 3 * 4 * HIDDEN * 8
    for forward, backward in pk.testing.run_ranks(block_traffic, 2, True):
        assert forward == [("all_gather", activation), ("reduce_scatter", activation)] * 2
        assert backward == [("all_gather", activation), ("reduce_scatter", activation)] * 2


def peak_memory(group):
    """Bytes by which this process's memory grew at most in building and one step."""

    def status(field):
        with open("/proc/self/status") as file:
            return 1024 * int(re.search(rf"{field}:\s*(\d+)", file.read()).group(1))

    def step(hidden, inner):
        layers = []
        for _ in range(2):
            layers.append(pk.nn.ColumnParallelLinear(hidden, inner, group=group, activation="gelu"))
            layers.append(pk.nn.RowParallelLinear(inner, hidden, group=group))
        model = nn.Sequential(*layers)
        model(torch.randn(16, hidden)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    mmap_threshold = (
        -3
    )  # fixed: else the allocator keeps some of what was freed, now more, now less
    ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 16)
    step(64, 256)  # whatever is loaded and made once
    group.barrier()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # begin the record of the peak anew
    before = status("VmRSS")
    step(1024, 4096)
    return status("VmHWM") - before


def test_peak_memory_falls_with_the_number_of_ranks():
    whole = 4 * 1024 * 4096 * 4
    peaks = {size: max(pk.testing.run_ranks(peak_memory, size)) for size in (1, 2, 4)}
    for size, peak in peaks.items():
        # weights, gradients, what computing one layer takes, and what no split makes smaller;
        # one gathered weight (16.8 MB) would be too much for 4 ranks
        assert peak < 2.5 * whole / size + 16e6, peaks
    assert peaks[4] < 0.45 * peaks[1], peaks


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(HEADS, 64), nn.Linear(64, HEADS)

    def forward(self, x, group):
        with pk.nn.split_random(group):
            split = nn.functional.dropout(self.q_proj(x), 0.5, self.training)
        return nn.functional.dropout(self.o_proj(split), 0.5, self.training), split


def dropout(group):
    torch.manual_seed(9)
    model = pk.tensor_parallel(Dropping(), group, {"q_proj": "colwise", "o_proj": "rowwise"})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    x = torch.ones(32, HEADS)
    torch.manual_seed(5)
    y, split = model(x, group)
    after = torch.rand(1).item()
    torch.manual_seed(5)
    again, _ = model(x, group)
    return (y == 0).tolist(), (split == 0).tolist(), torch.equal(y, again), after


def test_dropout_differs_on_split_activations_and_agrees_on_replicated_ones():
    (y0, split0, same0, after0), (y1, split1, same1, after1) = pk.testing.run_ranks(dropout, 2)
    assert y0 == y1
    assert split0 != split1
    assert same0
    assert same1
    assert after0 == after1


def dtensors(group, folder):
    import torch.distributed.checkpoint as dcp

    model = pk.tensor_parallel(block(), group, PLAN)
    views = pk.nn.as_dtensor(model)
    whole = block().state_dict()
    wrong = [n for n, t in whole.items() if not torch.equal(views[n].full_tensor(), t)]
    dcp.save(views, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.load(pk.nn.as_dtensor(model), checkpoint_id=folder)
    state = pk.gather_state_dict(model)
    return wrong, [n for n, t in whole.items() if not torch.equal(state[n], t)]


def test_weights_as_dtensors_are_saved_and_loaded_by_torch(tmp_path):
    assert pk.testing.run_ranks(dtensors, 2, str(tmp_path)) == [([], [])] * 2


def two_dimensions(group, sequence):
    """dp × tp on 4 ranks against one process over all examples, with unequal token counts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = pk.Group.from_mesh(mesh["dp"]), pk.Group.from_mesh(mesh["tp"])
    whole = block()
    split = pk.tensor_parallel(copy.deepcopy(whole), tp, PLAN, sequence_parallel=sequence)
    model = pk.DataParallel(split, dp)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, model)]
    totals = []
    for step in range(3):
        batches = [random(10 * step + r, n, 6, HIDDEN) for r, n in enumerate((1, 3))]
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole(torch.cat(batches)).square().mean().backward()
        x = batches[dp.rank]
        y = model(part(x, tp, -2) if sequence else x)
        # each tp rank has half of the mean's terms, and the sum over ranks is made by the layers
        loss = y.square().mean() / (tp.size if sequence else 1)
        model.backward(loss, weight=len(x))
        totals.append(float(model.total_weight))
        for optimizer in optimizers:
            optimizer.step()
    state = pk.gather_state_dict(split)
    return totals, max(float((state[n] - t).abs().max()) for n, t in whole.state_dict().items())


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_data_and_tensor_parallel_ranks_train_as_one_process(sequence):
    for totals, difference in pk.testing.run_ranks(two_dimensions, 4, sequence):
        assert totals == [4.0, 4.0, 4.0]  # examples count over dp only
        assert difference < 1e-13


def sharded_optimizer(group, fused):
    """dp × tp with ShardedAdamW that clips, against clip_grad_norm_ and AdamW in one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = pk.Group.from_mesh(mesh["dp"]), pk.Group.from_mesh(mesh["tp"])
    whole = block()
    split = pk.tensor_parallel(copy.deepcopy(whole), tp, PLAN)
    model = pk.DataParallel(split, dp)
    options = {"data_parallel": model} if fused else {"group": dp}
    optimizer = pk.ShardedAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.05, **options)
    plain = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    norms = []
    for step in range(3):
        batches = [random(10 * step + r, n, 6, HIDDEN) for r, n in enumerate((1, 3))]
        plain.zero_grad()
        whole(torch.cat(batches)).square().mean().backward()
        wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
        plain.step()
        optimizer.zero_grad()
        x = batches[dp.rank]
        model.backward(model(x).square().mean(), weight=len(x))
        optimizer.step()
        norms.append(float(abs(optimizer.last_grad_norm - wanted) / wanted))
    state = pk.gather_state_dict(split)
    worst = max(float((state[n] - t).abs().max()) for n, t in whole.state_dict().items())
    return max(norms), worst


@pytest.mark.parametrize("fused", [False, True], ids=["averaged", "fused"])
def test_sharded_adamw_clips_by_the_norm_of_the_unsplit_model(fused):
    for norm, difference in pk.testing.run_ranks(sharded_optimizer, 4, fused):
        assert norm < 1e-12
        assert difference < 1e-11  # AdamW divides by small roots


def wrong_loads(group):
    model = pk.tensor_parallel(block(), group, PLAN)
    before = pk.gather_state_dict(model)
    messages = []
    state = block().state_dict()
    for change in (
        lambda s: s.pop("down.bias"),
        lambda s: s.update(more=torch.ones(1)),
        lambda s: s.update({"up.weight": torch.ones(3, HIDDEN)}),
    ):
        changed = {name: 2 * tensor for name, tensor in state.items()}
        if group.rank == 1:
            change(changed)
        try:
            pk.load_full_state_dict(model, changed)
        except ValueError as error:
            messages.append(str(error))
    after = pk.gather_state_dict(model)
    return messages, all(torch.equal(after[n], before[n]) for n in before)


def test_a_state_dict_that_does_not_fit_on_one_rank_is_loaded_on_none():
    for messages, unchanged in pk.testing.run_ranks(wrong_loads, 2):
        assert unchanged
        for message, part_of in zip(
            messages, ("down.bias", "more", "up.weight must be"), strict=True
        ):
            assert part_of in message
            assert "[rank 1 of 2]" in message


def test_a_group_of_one_needs_no_processes():
    whole = block()
    split = pk.tensor_parallel(copy.deepcopy(whole), pk.init(), PLAN)
    x = random(1, 2, 3, HIDDEN)
    assert not dist.is_initialized()
    assert torch.allclose(split(x), whole(x), rtol=0, atol=1e-13)
