"""The recipes of docs/recipes.md as they stand, with the real packages, against one process."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path

import pytest
import torch
from training import items, mlp

from parallelkit.testing import run_ranks

RECIPES = Path(__file__).parents[1] / "docs" / "recipes.md"


def recipe(title: str) -> dict:
    """What the code under a heading defines."""
    section = RECIPES.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    names: dict = {"__name__": "recipe"}
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], names)
    return names


def like_torchrun(group):
    """The variables by which other packages know of the ranks."""
    os.environ.update(
        RANK=str(group.rank),
        LOCAL_RANK=str(group.rank),
        WORLD_SIZE=str(group.size),
        LOCAL_WORLD_SIZE=str(group.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        ACCELERATE_USE_CPU="1",
    )


def mean_loss(model, x):
    return model(x.float()).square().sum(-1).mean(), len(x)


def one_process(module, steps, optimizer_of):
    """Weights after steps on whole batches."""
    module = copy.deepcopy(module)
    optimizer = optimizer_of(module.parameters())
    for batch in steps:
        optimizer.zero_grad()
        mean_loss(module, batch)[0].backward()
        optimizer.step()
    return module.state_dict()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def assert_same(found, expected):
    torch.testing.assert_close(dict(found), dict(expected), rtol=1e-5, atol=1e-6)


def plain_loop(group):
    parts = [x for x, _ in items([3, 1, 4, 2, 5, 2])]
    of_rank = [[[parts[0], parts[1]], [parts[3]], [parts[5]]], [[parts[2]], [parts[4]]]]
    model = recipe("A plain PyTorch loop")["train"](mlp(), of_rank[group.rank], mean_loss)
    steps = [torch.cat(parts[:3]), torch.cat(parts[3:5]), parts[5]]
    expected = one_process(mlp(), steps, lambda p: torch.optim.AdamW(p, lr=1e-2))
    return model.state_dict(), expected


def test_a_plain_loop_with_uneven_micro_batches_and_steps():
    for found, expected in run_ranks(plain_loop, 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def fully_sharded(group, replicas):
    parts = [x for x, _ in items([3, 1, 4, 2, 5, 2, 1, 3])]
    model = recipe("FSDP2")["train"](mlp(), parts[group.rank :: group.size], mean_loss, replicas)

    def clipped(parameters):
        parameters = list(parameters)
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)

        def clip(*_):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    steps = [torch.cat(parts[at : at + group.size]) for at in range(0, len(parts), group.size)]
    state = {name: p.full_tensor() for name, p in model.state_dict().items()}
    return state, one_process(mlp(), steps, clipped)


@pytest.mark.parametrize("replicas", [1, 2])
def test_fsdp2_with_batches_of_different_sizes(replicas):
    for found, expected in run_ranks(fully_sharded, 2 * replicas, replicas):
        torch.testing.assert_close(found, dict(expected), rtol=1e-4, atol=1e-5)


def documents():
    """Token ids of different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (24,), generator=generator).tolist()
    return [torch.randint(1, 32, (length,), generator=generator) for length in lengths]


def padded(batch):
    """Input ids and labels of one length, padding without a label."""
    width = max(map(len, batch))
    rows = [torch.cat([ids, ids.new_zeros(width - len(ids))]) for ids in batch]
    labels = [torch.cat([ids, ids.new_full((width - len(ids),), -100)]) for ids in batch]
    return {"input_ids": torch.stack(rows), "labels": torch.stack(labels)}


def tiny_llama():
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
            pad_token_id=0,
        )
    )


def trainer(group, folder):
    import transformers

    like_torchrun(group)
    names = recipe("Hugging Face Trainer")

    class InOrder(names["WeightedTrainer"]):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = tiny_llama()
    InOrder(
        model=model,
        args=names["arguments"](
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=3,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=documents(),
        data_collator=padded,
    ).train()
    whole, optimizer = tiny_llama(), None
    optimizer = sgd(whole.parameters())
    transformers.set_seed(0)
    for step in range(3):
        optimizer.zero_grad()
        whole(**padded(documents()[8 * step : 8 * step + 8])).loss.backward()
        optimizer.step()
    return model.state_dict(), whole.state_dict()


@pytest.mark.slow
def test_hugging_face_trainer_averages_over_the_tokens_of_all_ranks_and_micro_batches(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    for found, expected in run_ranks(trainer, 2, str(tmp_path)):
        assert_same(found, expected)


def accelerated(group):
    like_torchrun(group)
    whole = items([13])[0][0]
    module = mlp()
    loader = torch.utils.data.DataLoader(whole, batch_size=2)
    model = recipe("Accelerate")["train"](
        module, loader, sgd(module.parameters()), mean_loss, accumulate=2
    )
    # Accelerate repeats samples from the start until all ranks have as many: 16, 8 a step.
    whole = torch.cat([whole, whole[:3]])
    return model.state_dict(), one_process(mlp(), whole.split(8), sgd)


@pytest.mark.slow
def test_accelerate_with_gradient_accumulation():
    pytest.importorskip("accelerate")
    for found, expected in run_ranks(accelerated, 2):
        assert_same(found, expected)


def lightened(group, folder):
    like_torchrun(group)
    parts = [x for x, _ in items([3, 1, 4, 2])]
    mine = parts[group.rank :: 2]
    model = recipe("Lightning")["fit"](
        mlp(),
        torch.utils.data.DataLoader(mine, batch_size=None),
        mean_loss,
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    steps = [torch.cat(parts[:2]), torch.cat(parts[2:])]
    return model.state_dict(), one_process(mlp(), steps, sgd)


@pytest.mark.slow
def test_lightning_steps_by_the_mean_over_all_items(tmp_path):
    pytest.importorskip("lightning")
    for found, expected in run_ranks(lightened, 2, str(tmp_path)):
        assert_same(found, expected)
