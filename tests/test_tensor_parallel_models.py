"""Hugging Face models split by `pk.tensor_parallel`, against the same model whole in this process.

Importing transformers takes seconds in every rank: there is one run on two ranks, one on four.
"""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import parallelkit as pk

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

VOCAB, HIDDEN = 53, 32  # 53 does not divide by 2 or 4
BATCH, TOKENS = 2, 7


def build(name):
    """A small model with random weights, no dropout, in float64."""
    import transformers as hf

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 46,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    grouped = sizes | {"num_key_value_heads": 4 if name.endswith("-4") else 2}
    no_dropout = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    gpt2 = {
        "vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 32,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0,
        "eos_token_id": 1,
    }  # fmt: skip
    bert = sizes | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    opt = sizes | {"ffn_dim": 46, "word_embed_proj_dim": HIDDEN, "dropout": 0.0}
    latent = sizes | {
        "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4, "v_head_dim": 6,
    }  # fmt: skip
    head = {"head_dim": HIDDEN // 4}
    tied = {"tie_word_embeddings": True}
    makers = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**grouped)),
        "llama-tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**grouped, **tied)),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**grouped)),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**grouped, **head)),
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**grouped, **head)),
        "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**grouped, **head)),
        "phi": lambda: hf.PhiForCausalLM(
            hf.PhiConfig(**grouped, resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0)
        ),
        "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**grouped)),
        "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**sizes, **no_dropout)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**bert)),
        "minicpm3": lambda: hf.MiniCPM3ForCausalLM(hf.MiniCPM3Config(**latent)),
        "opt": lambda: hf.OPTForCausalLM(hf.OPTConfig(**opt)),
    }
    torch.manual_seed(7)
    model = makers[name.removesuffix("-4")]().double()
    with torch.no_grad():
        for parameter in model.parameters():  # ones and zeros hide mistakes
            parameter.add_(0.3 * torch.randn_like(parameter) / math.sqrt(parameter.shape[-1]))
    return model.train()


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (BATCH, TOKENS), generator=generator)


class KeepDouble(TorchFunctionMode):
    """Norms, softmaxes and losses that go through float32 do not, where the model is in float64.

    Else one last bit of difference can decide a rounding to float32 and become 1e-7.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in args):
                return args[0]
            if kwargs.get("dtype") == torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def run(model, ids):
    with KeepDouble():
        output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return output


def worst(found, wanted):
    """The largest difference, in units of the wanted tensor's largest value."""
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3))


def differing_bits(group, model):
    """Names of parameters that every rank has whole, but not with the same bits."""
    alike = {n: getattr(p, "tp_split", None) for n, p in model.named_parameters()}
    copies = {n: group.size if split is None else split.copies for n, split in alike.items()}
    told = group._gather_objects(
        {n: p.detach().numpy().tobytes() for n, p in model.named_parameters()}
    )
    return [
        name
        for name, count in copies.items()
        for first in range(0, group.size, count)
        if len({rank[name] for rank in told[first : first + count]}) > 1
    ]


def compare(group, names, sequence_parallel, dtype):
    """Of each model the largest relative difference in logits, gradients, weights after steps."""
    differences = {}
    for name in names:
        whole = build(name).to(dtype)
        split = pk.tensor_parallel(copy.deepcopy(whole), group, sequence_parallel=sequence_parallel)
        found, wanted = run(split, batch()), run(whole, batch())
        gradients = pk.gather_gradients(split)
        reference = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
        assert gradients.keys() == reference.keys(), name
        worst_gradient = max((worst(gradients[n], reference[n]), n) for n in reference)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (split, whole)]
        for step in range(3):
            for model, optimizer in zip((split, whole), optimizers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                run(model, batch(step + 1))
        state, plain = pk.gather_state_dict(split), whole.state_dict()
        assert list(state) == list(plain), name
        assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in plain.items()}
        trained = max((worst(state[n], plain[n]), n) for n in plain)
        differences[name] = (worst(found.logits, wanted.logits), worst_gradient, trained)
        assert differing_bits(group, split) == [], name
    return differences


ALL = [
    "llama", "llama-tied", "qwen2", "qwen3", "mistral", "gemma", "phi", "phi3", "gpt_neox", "gpt2",
    "bert", "opt", "minicpm3",
]  # fmt: skip


def check(results, bound):
    for differences in results:
        for name, (logits, gradient, trained) in differences.items():
            assert logits < bound, (name, "logits", logits)
            assert gradient[0] < bound, (name, "gradient", gradient)
            assert trained[0] < bound, (name, "weights after training", trained)


def round_trip(group, folder):
    problems = []
    for name in ("llama-tied", "gpt2", "bert"):
        whole = build(name).eval()
        with torch.no_grad():
            wanted = whole(input_ids=batch()).logits
        split = pk.tensor_parallel(build(name).eval(), group)
        state = pk.gather_state_dict(split)
        if group.rank == 0:
            split.save_pretrained(f"{folder}/{name}", state_dict=state)
        group.barrier()
        fresh = type(whole).from_pretrained(f"{folder}/{name}", dtype=torch.float64).eval()
        other = build(name).eval()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
        other = pk.tensor_parallel(other, group)
        pk.load_full_state_dict(other, whole.state_dict())
        with torch.no_grad():
            if worst(fresh(input_ids=batch()).logits, wanted) > 1e-10:
                problems.append((name, "saved and loaded into a fresh model"))
            if worst(other(input_ids=batch()).logits, wanted) > 1e-10:
                problems.append((name, "loaded into a split model"))
    return problems


def refusals(group):
    import transformers as hf

    messages = {}

    def note(what, *arguments, **options):
        model = arguments[0]
        before = {n: (id(m), type(m)) for n, m in model.named_modules()}
        try:
            pk.tensor_parallel(*arguments, **options)
        except ValueError as error:
            messages[what] = str(error)
        assert before == {n: (id(m), type(m)) for n, m in model.named_modules()}, what

    uneven = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=12, num_key_value_heads=3,
    )  # fmt: skip
    note("key-value heads", hf.LlamaForCausalLM(uneven), group)
    unknown = build("llama")
    for layer in unknown.model.layers:
        del layer.self_attn.num_key_value_groups
    note("its own attention", unknown, group)
    note("style", build("llama-4"), group, {"model.layers.*.mlp": "moe_tp_experts"})
    note("name", build("llama-4"), group, {"model.layers.*.mlp.down": "rowwise"})
    moe = hf.MixtralForCausalLM(
        hf.MixtralConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=4, num_local_experts=2,
        )
    )  # fmt: skip
    note("experts", moe, group)
    plan = {"model.layers.*.mlp.down_proj": "rowwise"}
    if group.rank == 1:
        plan = {"model.layers.*.mlp.up_proj": "colwise"}
    note("plans differ", build("llama-4"), group, plan)
    if group.rank == 1:
        plan = {"nowhere": "colwise"}
    note("one bad plan", build("llama-4"), group, plan)
    different = build("llama-4")
    if group.rank == 1:
        with torch.no_grad():
            different.model.norm.weight[3] += 1e-12
    note("models differ", different, group)
    note("no plan", torch.nn.Sequential(torch.nn.Linear(4, 4)), group)
    note("sequence", build("phi3-4"), group, sequence_parallel=True)
    return messages


def with_dropout(group):
    """Masks and replicas of models that drop, also when layers are computed twice."""
    problems = []
    for name, sequence_parallel in (("gpt2", False), ("gpt2", True), ("bert", False)):
        gradients = []
        for checkpointing in (False, True):
            model = build(name)
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.3
            split = pk.tensor_parallel(model, group, sequence_parallel=sequence_parallel)
            if checkpointing:
                split.gradient_checkpointing_enable({"use_reentrant": False})
            torch.manual_seed(3)
            loss = run(split, batch()).loss
            if len(set(group._gather_objects(float(loss)))) > 1:
                problems.append((name, sequence_parallel, "the ranks' losses differ"))
            if len(set(group._gather_objects(float(torch.rand(1))))) > 1:
                problems.append((name, sequence_parallel, "the generators differ afterwards"))
            for parameter in split.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.1)
            if differing_bits(group, split):
                problems.append((name, sequence_parallel, "replicas differ"))
            gradients.append(pk.gather_gradients(split))
        largest = max(worst(gradients[1][n], gradients[0][n]) for n in gradients[0])
        if largest > 1e-10:
            problems.append((name, sequence_parallel, "recomputed with other masks", largest))
    return problems


def compiled(group):
    """Each way of compiling against the unsplit model; a second graph would be an error."""

    def one_layer():
        model = build("llama")  # each layer takes seconds to trace
        model.model.layers = model.model.layers[:1]
        return model

    differences = {}
    whole = one_layer()
    ids = batch()[:, :6]  # shards of one length
    wanted = run(whole, ids)
    reference = {n: p.grad for n, p in whole.named_parameters()}
    for sequence, backend in ((False, "aot_eager"), (True, "eager")):
        torch._dynamo.reset()
        split = pk.tensor_parallel(one_layer(), group, sequence_parallel=sequence)
        found = torch.compile(split, backend=backend, fullgraph=True)(input_ids=ids, labels=ids)
        found.loss.backward()
        gradients = pk.gather_gradients(split)
        gradient = max((worst(gradients[n], reference[n]), n) for n in reference)
        differences[sequence, backend] = worst(found.logits, wanted.logits), gradient
    return differences


def on_two_ranks(group, folder):
    sharded = [name for name in ALL if name not in ("phi3", "opt", "minicpm3")]
    return {
        "whole sequences": compare(group, ALL, False, torch.float64),
        "sharded sequences": compare(group, sharded, True, torch.float64),
        "saved and loaded": round_trip(group, folder),
        "dropout": with_dropout(group),
        "compiled": compiled(group),
    }


def fewer_heads_than_ranks(group):
    """Two key-value heads on four ranks: each on two neighbours, in memory, norms and files."""
    whole = build("qwen2").to(torch.float32)
    split = pk.tensor_parallel(copy.deepcopy(whole), group)
    attention = split.model.layers[0].self_attn
    width = HIDDEN // 4
    assert attention.k_proj.weight.shape == (width, HIDDEN)
    assert attention.q_proj.weight.shape == (width, HIDDEN)
    start = group.rank // 2 * width
    kept = whole.model.layers[0].self_attn.k_proj.weight[start : start + width]
    assert torch.equal(attention.k_proj.weight, kept)

    single = pk.Group(dist.new_group([group.rank], use_local_synchronization=True))
    norms = []
    for model in (split, whole):
        optimizer = pk.ShardedAdamW(model.parameters(), group=single, max_grad_norm=0.5)
        run(model, batch())
        optimizer.step()
        norms.append(optimizer.last_grad_norm)
    state = pk.gather_state_dict(split)
    after_step = max(worst(state[n], t) for n, t in whole.state_dict().items())
    other = build("qwen2").to(torch.float32)
    for parameter in other.parameters():
        parameter.data.mul_(0.5)
    other = pk.tensor_parallel(other, group)
    pk.load_full_state_dict(other, whole.state_dict())
    with torch.no_grad():
        logits = [m(input_ids=batch()).logits for m in (other, whole, copy.deepcopy(split))]
    return abs(norms[0] / norms[1] - 1), after_step, *(worst(y, logits[1]) for y in logits)


def on_four_ranks(group):
    names = ["llama-tied-4", "gpt2", "bert", "llama", "qwen2", "qwen3"]
    return {
        "fewer heads": fewer_heads_than_ranks(group),
        "whole sequences": compare(group, names, False, torch.float32),
        "sharded sequences": compare(group, names, True, torch.float32),
        "refused": refusals(group),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return pk.testing.run_ranks(on_two_ranks, 2, str(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def four():
    return pk.testing.run_ranks(on_four_ranks, 4)


def test_every_model_has_the_logits_gradients_and_training_of_the_unsplit_one(two):
    check([rank["whole sequences"] for rank in two], 1e-10)


def test_the_same_with_sequence_parallelism_and_a_sequence_that_does_not_divide(two):
    check([rank["sharded sequences"] for rank in two], 1e-10)


def test_the_same_on_four_ranks_in_float32(four):
    check([rank["whole sequences"] for rank in four], 1e-5)
    check([rank["sharded sequences"] for rank in four], 1e-5)


def test_with_fewer_key_value_heads_than_ranks_neighbours_have_the_same(four):
    for rank in four:
        assert max(rank["fewer heads"]) < 1e-4, rank["fewer heads"]


def test_a_gathered_model_is_saved_and_loaded_as_transformers_does(two):
    assert [rank["saved and loaded"] for rank in two] == [[], []]


def test_a_compiled_model_is_one_graph_with_the_same_logits_and_gradients(two):
    for rank in two:
        assert len(rank["compiled"]) == 2
        for way, (logits, gradient) in rank["compiled"].items():
            assert logits < 1e-5 and gradient[0] < 1e-5, (way, logits, gradient)


def test_dropout_keeps_replicas_equal_and_recomputation_draws_the_same_masks(two):
    assert [rank["dropout"] for rank in two] == [[], []]


def test_what_cannot_be_split_is_one_value_error_on_every_rank_and_changes_nothing(four):
    results = [rank["refused"] for rank in four]
    assert all(messages == results[0] for messages in results)
    parts = {
        "key-value heads": "3 heads (num_key_value_heads) cannot be split over 4 ranks",
        "its own attention": "2 heads (num_key_value_heads) cannot be split over 4 ranks",
        "style": "'moe_tp_experts', which is not supported",
        "name": "'model.layers.*.mlp.down' matches no module",
        "experts": "moe_tp_experts",
        "plans differ": "ranks 0 and 1 have different plans",
        "one bad plan": "[rank 1 of 4]",
        "models differ": "beginning with model.norm.weight",
        "no plan": "carries no plan",
        "sequence": "pass sequence_parallel=False",
    }
    assert results[0].keys() == parts.keys()
    for what, part in parts.items():
        assert part in results[0][what], results[0][what]
