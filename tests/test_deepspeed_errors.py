"""What DeepSpeed jobs get wrong is refused by name, on every rank, with what to write instead."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from deepspeed_jobs import Job, clean_state, config_of, libraries, make_engine, make_model, run_step

from cce_dist import VocabParallelEmbedding, VocabShard, linear_cross_entropy
from cce_dist.integrations.deepspeed import TensorParallelUnit, head_loss, prepare, shard_head
from cce_dist.integrations.transformers import patch


def small(name, **config):
    import transformers

    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2,
    }  # fmt: skip
    if name == "T5":
        sizes = {"vocab_size": 97, "d_model": 32, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 16}
    kind = {"T5": "T5ForConditionalGeneration", "Base": "LlamaModel"}.get(name, f"{name}ForCausalLM")
    name = "Llama" if name == "Base" else name
    return getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**sizes, **config))


def row_parallel():
    model = small("Llama")
    # as AutoTP leaves a head that is split over its features
    model.lm_head = type("LmHeadLinearAllreduce", (torch.nn.Linear,), {"mp_group": None})(32, 97)
    return model


def with_adapter():
    model = small("Llama")
    model.lm_head = type("LoraLinear", (torch.nn.Linear,), {"forward": lambda self, x: x})(32, 97)
    return model


def half_of_the_rows():
    model = small("Llama")
    model.lm_head.weight.data = model.lm_head.weight.data[:48].clone()
    return model


def embedding_sharded_alone():
    model = small("Llama", tie_word_embeddings=True)
    shard = VocabShard(0, 97, 97)
    model.set_input_embeddings(VocabParallelEmbedding.from_embedding(model.model.embed_tokens, shard=shard))
    return model


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (lambda: torch.nn.Linear(3, 3), {}, ValueError, "model: Linear has no head .* pass head='lm_head'"),
        (lambda: small("Base"), {}, ValueError, "model: LlamaModel has no head"),
        (lambda: small("Llama"), {"head": "head"}, ValueError, "head: LlamaForCausalLM has no module 'head'"),
        (lambda: small("Llama"), {"head": torch.nn.Linear(3, 3)}, ValueError, "head: Linear is no module of Llama"),
        (row_parallel, {}, ValueError, "head: AutoTP made it a LmHeadLinearAllreduce, .*vocab_parallel_lm_head"),
        (half_of_the_rows, {}, ValueError, "lm_head.weight has 48 rows, the model's vocabulary 97, .*shard_head"),
        (embedding_sharded_alone, {}, ValueError, "its config ties the embeddings, but .* are two parameters"),
        (with_adapter, {}, TypeError, "head: expected an nn.Linear, .* got LoraLinear, whose forward may do more"),
        (
            lambda: small("Llama"),
            {"soft_cap": 30.0},
            TypeError,
            r"unknown options \['soft_cap'\]; prepare takes \['class_weight', 'ignore",
        ),
        (lambda: "model", {}, TypeError, "model must be an nn.Module or DeepSpeed's engine, got str"),
        (lambda: small("T5"), {}, ValueError, "T5ForConditionalGeneration is no causal language model"),
    ],
)
def test_models_that_can_not_be_made_right(make, options, error, message) -> None:
    with pytest.raises(error, match=message):
        prepare(make(), **options)


def test_a_model_that_changes_its_logits() -> None:
    import transformers

    class Shifted(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None):
            logits = self.lm_head(self.model(input_ids)[0]) + 2
            return self.loss_function(logits=logits, labels=labels, vocab_size=97)

    class Silent(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None):
            return self.lm_head(self.model(input_ids)[0])

    ids = torch.arange(8).view(1, 8)
    for kind, message in (
        (Shifted, "changes or reads its logits .* by its __add__"),
        (Silent, "did not take its loss"),
    ):
        model = kind(small("Llama").config)
        prepare(model)
        with pytest.raises(RuntimeError, match=message):
            model(ids, labels=ids)
        # and is as it was
        assert model.lm_head(torch.zeros(1, 8, 32)).shape == (1, 8, 97)
        assert "ForCausalLMLoss" in repr(model.loss_function)


def check_no_mpu(device, prepared):
    deepspeed = libraries()
    model = make_model(False, 204)
    shard_head(model, dist.group.WORLD)
    message = r"the ranks \[0, 1.*\] hold different rows of .* pass deepspeed.initialize\(.*TensorParallelUnit"
    if prepared == "before":
        prepare(model)
    elif prepared == "patched":
        patch(model)
    with clean_state():
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config_of(Job("zero", 1))
        )
        act = prepare if prepared == "after" else lambda: run_step(Job("zero", 1, vocab=204), engine, 0, device)
        with pytest.raises(ValueError, match=message):
            act(*([engine] if prepared == "after" else []))


@pytest.mark.parametrize("prepared", ["before", "after", "patched"])
def test_no_mpu(world, prepared) -> None:
    world.run(check_no_mpu, prepared)


def check_outside(device):
    deepspeed = libraries()
    from deepspeed.utils import safe_get_full_grad

    with clean_state():
        engine = make_engine(Job("zero", 3), device, prepare="no")
        model = engine.module
        ids = torch.randint(203, (2, 8), generator=torch.Generator().manual_seed(1)).to(device)
        hidden = model.model(input_ids=ids)[0]
        with pytest.raises(ValueError, match=r"weight must have .* got \(0,\). ZeRO-3 .* call the loss inside it"):
            linear_cross_entropy(hidden, model.lm_head.weight, ids)
        # the head's own module gathers it, wherever it is called
        loss = head_loss(model.lm_head, hidden, ids)
        engine.backward(loss)
        found = safe_get_full_grad(model.lm_head.weight)
        with deepspeed.zero.GatheredParameters([model.lm_head.weight]):
            weight = model.lm_head.weight.detach().clone().requires_grad_()
        linear_cross_entropy(hidden.detach(), weight, ids).backward()
        # every rank had the same tokens
        assert (found - weight.grad).norm() <= 1e-6 * weight.grad.norm()


def test_a_loss_outside_of_the_model(world) -> None:
    world.run(check_outside)


def check_sequence_parallel(device):
    job = Job("ulysses", 3, parallel=2)
    with clean_state():
        engine = make_engine(job, device, prepare="before")
        with pytest.raises(ValueError, match=r"call prepare\(engine\) after deepspeed.initialize"):
            run_step(job, engine, 0, device)
    with clean_state():
        zero = {"stage": 3, "reduce_scatter": False, "reduce_bucket_size": 20000}
        with pytest.raises(ValueError, match='"reduce_scatter": false at stage 3 adds up some gradients'):
            make_engine(job, device, zero_optimization=zero)


def test_sequence_parallelism_that_is_not_known(world) -> None:
    world.run(check_sequence_parallel)


def check_stage_0(device):
    with clean_state(), pytest.raises(ValueError, match="stage 0 in fp16 divides gradients by a loss scale"):
        make_engine(Job("zero", 0, "fp16"), device)
    pair, wrong_norm = dist.get_rank() // 2 * 2, "takes the norm of the first tensor-parallel rank's"
    rows = f"rows {['0:102', '102:203'][dist.get_rank() % 2]} on this of the tensor-parallel ranks {[pair, pair + 1]}"
    with clean_state():
        with pytest.warns(UserWarning, match=wrong_norm):
            engine = make_engine(Job("autotp-vocab", 0, "bf16", parallel=2), device)
        with pytest.warns(UserWarning, match=wrong_norm):
            path = prepare(engine)
        assert f"computes the loss in lm_head, AutoTP's VocabParallelLinear ({rows}, of 203 classes)" in str(path)
    with clean_state():
        engine = make_engine(Job("autotp", 1, parallel=2), device)
        path = str(prepare(engine))
        assert f"computes the loss in lm_head, AutoTP's LinearLayer ({rows}, of 203 classes); ZeRO stage 1" in path
    with clean_state():
        engine = make_engine(Job("mpu", 1, parallel=2), device)
        with pytest.raises(ValueError, match=r"its head is cce_dist's VocabParallelLMHead already; shard a whole"):
            shard_head(engine.module, None)
        start = 102 * (dist.get_rank() % 2)
        ranks = [dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1]
        rows = f"rows {start}:{[102, 203][start > 0]} on this of the tensor-parallel ranks {ranks}, of 203 classes"
        expected = f"the model's forward computes the loss in lm_head, cce_dist's VocabParallelLMHead ({rows}); ZeRO"
        assert str(prepare(engine)) == f"{expected} stage 1"
    with clean_state():
        engine = make_engine(Job("zero", 3), device)
        with pytest.raises(ValueError, match="its head is partitioned by ZeRO-3 already"):
            shard_head(engine.module, None)
    with pytest.raises(ValueError, match=re.escape("size must divide the 4 ranks, got 3")):
        TensorParallelUnit(3)


def test_what_deepspeed_itself_gets_wrong(world) -> None:
    if world.size != 4:
        pytest.skip("four ranks in pairs")
    world.run(check_stage_0)
