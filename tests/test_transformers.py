"""Models of Hugging Face's with and without a patch: the same losses, gradients, logits and tokens."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from inputs import IGNORED
from tolerance import LOSS, assert_gradient

from cce_dist import TokenStats, VocabShard
from cce_dist.integrations.transformers import patch, unpatch

transformers = pytest.importorskip("transformers", reason="needs the extra train")
VOCAB = 97
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "Llama": {},
    "Llama-tied": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 16},
    # all bite, at logits of a few units
    "Gemma2": {"head_dim": 16, "final_logit_softcapping": 2.0},
    "Gemma3": {"head_dim": 16, "final_logit_softcapping": 1.5},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 3.0},
    "GPT2": {},
    # eager: the grouped products do not know fp64
    "Mixtral": {
        "experts_implementation": "eager", "num_local_experts": 3, "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
    "Qwen3Moe": {
        "experts_implementation": "eager", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "head_dim": 16, "output_router_logits": True, "router_aux_loss_coef": 0.5,
    },
    # scaled by a multiplier of its own name, capped with another one's
    "FalconH1": {"lm_head_multiplier": 0.4, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    "NanoChat": {"final_logit_softcapping": 2.0},
}  # fmt: skip


def make_model(name="Llama", dtype=torch.float32, **config):
    kind = name.partition("-")[0]
    sizes = {**SIZES, **MODELS[name], **config}
    if kind == "Gemma3":
        settings = transformers.Gemma3TextConfig(**sizes)
    elif kind == "GPT2":
        sizes |= {"n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        settings = transformers.GPT2Config(
            **{k: v for k, v in sizes.items() if "_size" not in k or k == "vocab_size"}
        )
    else:
        settings = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(0)
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.to(dtype).train()


def make_batch(batch=3, length=13):
    ids = torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(5))
    return ids, ids.masked_fill(ids % 4 == 0, IGNORED)


def gradients_of(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_as_unpatched(model, inputs, **options):
    """The loss and every gradient, in fp32, are as near to the unpatched model's in fp64 as its own in fp32."""
    truth_loss, truth = gradients_of(copy.deepcopy(model).double(), **inputs)
    yard_loss, yard = gradients_of(model, **inputs)
    with patch(model, **options):
        loss, found = gradients_of(model, **inputs)
        assert model(**inputs).logits.shape == (*inputs["input_ids"].shape, 0)
    assert loss.dtype == torch.float32
    assert abs(loss - truth_loss) <= LOSS * truth_loss
    assert abs(loss - yard_loss) <= LOSS * yard_loss
    assert found.keys() == yard.keys()
    for name in found:
        assert_gradient(found[name], truth[name].double(), [yard[name]], name, largest_logit=10.0)


@pytest.mark.parametrize("name", MODELS)
def test_trains_as_unpatched(name) -> None:
    model = make_model(name)
    ids, labels = make_batch()
    assert_as_unpatched(model, {"input_ids": ids, "labels": labels, "num_items_in_batch": torch.tensor(50)})


@pytest.mark.parametrize("count", [None, 7, torch.tensor(7), torch.tensor(7.5)], ids=str)
def test_counts_and_labels_are_taken_as_the_model_takes_them(count) -> None:
    model = make_model()
    ids, labels = make_batch()
    shifted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    count = {} if count is None else {"num_items_in_batch": count}
    expected = model(ids, labels=labels, **count).loss.item()
    patch(model)
    for inputs in ({"labels": labels}, {"shift_labels": shifted}, {"labels": ids, "shift_labels": shifted}):
        assert model(ids, **inputs, **count).loss.item() == pytest.approx(expected, rel=LOSS)
    assert model(ids, labels=labels, return_dict=False, **count)[0].item() == pytest.approx(expected, rel=LOSS)
    # of the model's loss, as of its own
    ones = labels.masked_fill(labels == IGNORED, 1)
    assert model(ids, labels=ones, ignore_index=1, **count).loss.item() == pytest.approx(expected, rel=LOSS)
    nothing = model(ids, labels=torch.full_like(ids, IGNORED), **count).loss
    nothing.backward()
    assert nothing == 0
    assert not model.lm_head.weight.grad.any()


def test_options_of_the_loss() -> None:
    model = make_model()
    ids, labels = make_batch()
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].flatten(0, 1)
    patch(model, label_smoothing=0.2, z_loss=0.1, memory_budget="min", method="recompute")
    targets = labels[:, 1:].flatten()
    expected = F.cross_entropy(logits, targets, label_smoothing=0.2)
    expected += 0.1 * logits.logsumexp(-1)[targets != IGNORED].square().mean()
    assert model(ids, labels=labels).loss.item() == pytest.approx(expected.item(), rel=LOSS)


@pytest.mark.parametrize("name", ["Gemma2", "Granite", "Llama-tied"])
def test_evaluates_and_generates_as_unpatched(name) -> None:
    model = make_model(name).eval()
    ids, labels = make_batch()
    with torch.no_grad():
        expected, tokens = model(ids, labels=labels), model.generate(ids, max_new_tokens=5, do_sample=False)
        patch(model)
        found = model(ids, labels=labels)
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.loss, expected.loss)
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), tokens)
        skipped = model(ids, labels=labels, skip_logits=True)
        assert skipped.logits.shape == (*ids.shape, 0)
        assert skipped.loss.item() == pytest.approx(expected.loss.item(), rel=LOSS)
        model.train()
        assert torch.equal(model(ids, labels=labels, skip_logits=False).logits, expected.logits)
        assert torch.equal(model(ids).logits, expected.logits)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Cohere"])
def test_statistics_instead_of_logits(name) -> None:
    model = make_model(name).eval()
    ids, labels = make_batch()
    targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    with torch.no_grad():
        log_probs = model(ids).logits.log_softmax(-1)
        patch(model, skip_logits=True, return_stats=True)
        output = model(ids, labels=labels)
        names, values = zip(*output.items(), strict=True)
        assert (names[0], names[-4:]) == ("loss", TokenStats._fields)
        assert output.logits is None
        of_tuple = model(ids, labels=labels, return_dict=False)
        assert torch.equal(of_tuple[-1], values[-1])
    valid = targets != IGNORED
    assert torch.equal(output.argmax, torch.where(valid, log_probs.argmax(-1), -1))
    expected = log_probs.gather(-1, targets.clamp(0)[..., None])[..., 0] * valid
    torch.testing.assert_close(output.log_prob, expected, rtol=LOSS, atol=LOSS)
    entropy = -(log_probs.exp() * log_probs).sum(-1) * valid
    torch.testing.assert_close(output.entropy, entropy, rtol=LOSS, atol=LOSS)


def test_some_positions_only() -> None:
    model = make_model()
    ids, labels = make_batch()
    kept = F.pad(labels, (0, 1), value=IGNORED)[:, -5:].contiguous()
    inputs = {"input_ids": ids, "logits_to_keep": 5}
    expected = model(**inputs, labels=labels, shift_labels=kept).loss.item()
    patch(model)
    output = model(**inputs, shift_labels=kept)
    assert output.loss.item() == pytest.approx(expected, rel=LOSS)
    assert output.logits.shape == (3, 5, 0)
    # nor does the unpatched model take as many labels as there were tokens
    with pytest.raises(ValueError, match=r"targets must .*\(3, 13\)|\(3, 5"):
        model(**inputs, labels=labels)


def test_is_undone() -> None:
    model = make_model()
    ids, labels = make_batch()
    before, state = set(vars(model)), copy.deepcopy(model.state_dict())
    handle = patch(model)
    assert repr(handle) == "Patch(LlamaForCausalLM: lm_head, whole)"
    patched = model(ids, labels=labels)
    assert patched.logits.shape[-1] == 0
    assert model.state_dict().keys() == state.keys()
    assert set(vars(model)) == before | {"forward"}
    assert "forward" not in vars(model.lm_head)
    handle.unpatch()
    handle.unpatch()
    assert set(vars(model)) == before
    assert model(ids, labels=labels).logits.shape[-1] == VOCAB
    with pytest.raises(ValueError, match="the forward of LlamaForCausalLM is not patched"):
        unpatch(model)
    patch(model, ignore_index=-1)
    # the options of the last call
    patch(model)
    assert torch.equal(model(ids, labels=labels).loss, patched.loss)
    unpatch(model)
    with patch(model) as handle:
        # as accelerate wraps it
        inner = model.forward
        model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    assert model(ids, labels=labels).logits.shape[-1] == VOCAB


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = make_model()
    ids, labels = make_batch()
    before = model.lm_head
    with patch(model), pytest.raises(IndexError, match="targets must lie in"):
        model(ids, labels=labels.clamp(max=VOCAB) + VOCAB)
    assert model.lm_head is before
    assert model(ids, labels=labels).logits.shape[-1] == VOCAB


def test_a_copy_is_patched_and_apart() -> None:
    model = make_model()
    ids, labels = make_batch()
    patch(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert model(ids, labels=labels).loss.item() == pytest.approx(math.log(VOCAB), rel=LOSS)
    output = other(ids, labels=labels)
    output.loss.backward()
    assert output.loss.item() > 1.05 * math.log(VOCAB)
    assert other.lm_head.weight.grad.any()
    assert model.lm_head.weight.grad is None
    unpatch(other)
    assert model(ids, labels=labels).logits.shape[-1] == 0


def changing(change):
    """A Llama whose logits are ``change(logits)``."""

    class Changed(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            logits = change(self.lm_head(self.model(input_ids)[0]))
            loss = None if labels is None else self.loss_function(logits, labels, VOCAB, **kwargs)
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    model = make_model()
    model.__class__ = Changed
    return model


def in_place(x):
    y = x
    y *= 3
    y /= 2
    return x


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.float() * 3,
        lambda x: 3 * x.contiguous(),
        lambda x: x.to(torch.float64) / 4,
        lambda x: torch.tensor(0.3) * x,
        lambda x: x / torch.tensor(3.0),
        in_place,
        lambda x: 2 * torch.tanh(x / 2),
        lambda x: F.tanh(x.mul(0.7)) * 3,
        lambda x: torch.mul(torch.div(x, 7.0).tanh(), 4),
    ],
    ids=range(9),
)
def test_scales_and_caps_are_seen(change) -> None:
    ids, labels = make_batch()
    model = changing(change)
    with torch.no_grad():
        expected, plain = (m(ids, labels=labels).loss for m in (model, make_model()))
    assert abs(expected - plain) > 0.01, "the change changes something"
    assert_as_unpatched(model, {"input_ids": ids, "labels": labels})


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + 1,
        lambda x: x - x.mean(),
        lambda x: x[:, :-1],
        lambda x: x * torch.ones(VOCAB),
        lambda x: x.tanh() * torch.tensor(3.0),
        lambda x: x.tanh().tanh(),
        lambda x: 1 / x,
        lambda x: x.softmax(-1),
        lambda x: torch.relu(x),
        lambda x: x.masked_fill_(x > 0, 0),
        lambda x: x.mul_(2),
        lambda x: torch.cat([x, x]),
        lambda x: torch.zeros(3, 13, VOCAB),
    ],
    ids=range(13),
)
def test_other_changes_are_refused(change) -> None:
    ids, labels = make_batch()
    model = changing(change)
    patch(model)
    with pytest.raises(RuntimeError, match=r"the model changes .*its logits between head and loss_function"):
        model(ids, labels=labels)
    unpatch(model)
    assert torch.equal(model.lm_head(torch.zeros(1, 32)), torch.zeros(1, VOCAB))


def bart(kind):
    sizes = {
        f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "ffn_dim", "attention_heads")
    }
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=8, is_encoder_decoder=kind != "BartForCausalLM", **sizes
    )
    return getattr(transformers, kind)(config)


def bert():
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCAB, **sizes))


def with_head(head):
    model = make_model()
    model.lm_head = head
    return model


def with_weight(weight):
    model = make_model()
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    return model


def with_forward():
    model = make_model()
    model.lm_head.forward = lambda x: F.linear(x, model.lm_head.weight) ** 2
    return model


def with_loss():
    model = make_model()
    model.loss_function = lambda logits, labels, **kwargs: logits.sum()
    return model


class Packed(torch.Tensor):
    """As quantisation libraries hide a weight."""


Linear4bit = type("Linear4bit", (torch.nn.Linear,), {"forward": lambda self, x: x})


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (lambda: "model", {}, TypeError, "looked for a causal language model .* by its loss_function .* found str"),
        (lambda: torch.nn.Linear(3, 3), {}, TypeError, "looked for a causal language model .* found Linear"),
        (lambda: make_model().model, {}, ValueError, "LlamaModel has no head that get_output_embeddings"),
        (lambda: bart("BartForConditionalGeneration"), {}, ValueError, "is no causal language model"),
        (bert, {}, ValueError, "looked for ForCausalLMLoss .* found ForMaskedLMLoss"),
        (with_loss, {}, ValueError, "looked for ForCausalLMLoss .* found <lambda>"),
        (make_model, {"soft_cap": 3.0}, TypeError, r"unknown options \['soft_cap'\]; patch takes \['class_weight'"),
        (make_model, {"softcap": 3.0}, TypeError, r"unknown options \['softcap'\]"),
        (make_model, {"head": "head"}, ValueError, "has no module 'head'"),
        (make_model, {"head": "model.norm"}, TypeError, "expected an nn.Linear, .* got LlamaRMSNorm"),
        (make_model, {"shard": VocabShard(0, 48, 48)}, ValueError, "shard is of 48 rows .* got 97"),
        (lambda: with_head(Linear4bit(32, VOCAB)), {}, TypeError, "got Linear4bit, .* quantised"),
        (lambda: with_weight(torch.ones(VOCAB, 32).char()), {}, TypeError, "a Tensor of int8, as quantised"),
        (
            lambda: with_weight(torch.ones(VOCAB, 32).as_subclass(Packed)),
            {}, TypeError, "a Packed of float32, as quantised",
        ),
        (lambda: with_head(torch.nn.Linear(32, VOCAB, device="meta")), {}, ValueError, "on the meta device"),
        (lambda: with_head(torch.nn.Linear(32, 48)), {}, ValueError, "lm_head.weight has 48 rows, the model's voc"),
        (with_forward, {}, TypeError, "the forward of its Linear was replaced"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(make, options, error, message) -> None:
    with pytest.raises(error, match=message):
        patch(make(), **options)


def test_what_shows_in_the_first_forward_is_refused() -> None:
    ids, labels = make_batch()
    decoder = bart("BartForCausalLM")
    patch(decoder)
    with pytest.raises(RuntimeError, match="reads its logits between head and loss_function, by its view"):
        decoder(ids, labels=labels)
    model = make_model()
    patch(model)
    hook = model.lm_head.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(RuntimeError, match="a forward hook of Linear changes what it returns"):
        model(ids, labels=labels)
    hook.remove()
    model.loss_function = F.cross_entropy
    with pytest.raises(ValueError, match=r"looked for ForCausalLMLoss .* found cross_entropy"):
        model(ids, labels=labels)


def adapted(name="Llama", **config):
    import peft

    config = {"target_modules": ["q_proj", "lm_head"], "r": 4, "lora_alpha": 6, **config}
    torch.manual_seed(1)
    model = peft.get_peft_model(make_model(name), peft.LoraConfig(**config))
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.train()


class TestLoRA:
    @pytest.fixture(autouse=True)
    def _peft(self) -> None:
        self.peft = pytest.importorskip("peft", reason="needs the extra train")

    @pytest.mark.parametrize(
        "config",
        [
            {},
            {"use_rslora": True},
            {"target_modules": ["q_proj"]},
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        ],
        ids=["head", "rank-stabilised", "elsewhere", "head-saved"],
    )
    def test_trains_as_unpatched(self, config) -> None:
        ids, labels = make_batch()
        assert_as_unpatched(adapted(**config), {"input_ids": ids, "labels": labels})

    def test_with_a_soft_cap_and_dropout(self) -> None:
        ids, labels = make_batch()
        model = adapted("Gemma3", lora_dropout=0.5, target_modules=["lm_head"])
        torch.manual_seed(2)
        expected, theirs = gradients_of(model, input_ids=ids, labels=labels)
        patch(model)
        torch.manual_seed(2)
        loss, ours = gradients_of(model, input_ids=ids, labels=labels)
        torch.testing.assert_close(loss, expected, rtol=LOSS, atol=0)
        assert len(ours) == 2
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)

    def test_merged_disabled_and_several_adapters(self) -> None:
        ids, labels = make_batch()
        model = adapted(init_lora_weights=False)
        model.add_adapter("other", self.peft.LoraConfig(target_modules=["lm_head"], r=3, init_lora_weights=False))
        states = [model.disable_adapter_layers, model.enable_adapter_layers, lambda: model.set_adapter("other"),
                  lambda: model.base_model.set_adapter(["default", "other"]), model.merge_adapter]  # fmt: skip
        losses = []
        for change in states:
            change()
            expected = model(ids, labels=labels).loss.item()
            with patch(model):
                assert model(ids, labels=labels).loss.item() == pytest.approx(expected, rel=LOSS)
            losses.append(expected)
        assert len({round(loss, 3) for loss in losses}) == 4, "merged as two adapters, the others each their own"

    @pytest.mark.parametrize(
        ("config", "message"),
        [({"use_dora": True}, "is a DoraLinearVariant, no plain LoRA"), ({"lora_bias": True}, "has a bias")],
    )
    def test_other_adapters_are_refused(self, config, message) -> None:
        model = adapted()
        model.base_model.model.lm_head.base_layer.bias = torch.nn.Parameter(torch.zeros(VOCAB))
        model.add_adapter("other", self.peft.LoraConfig(target_modules=["lm_head"], **config))
        model.set_adapter("other")
        with pytest.raises(TypeError, match=message):
            patch(model)
        with pytest.raises(TypeError, match="got Linear, whose forward may do more"):
            patch(self.peft.get_peft_model(make_model(), self.peft.LoHaConfig(target_modules=["lm_head"])))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_compiles_up_to_the_loss(name) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    ids, labels = make_batch()
    model = make_model(name)
    expected, theirs = gradients_of(model, input_ids=ids, labels=labels)
    with pytest.raises(TypeError, match=r"model is compiled: patch it before torch\.compile"):
        patch(torch.compile(model))
    patch(model)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    counts = []
    for _ in range(3):
        model.zero_grad()
        loss = compiled(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=LOSS, atol=0)
        counts.append(counter.frame_count)
    # the decoder, what is done to the logits, what follows the loss, and the tests' poisoned memory
    assert counts[0] <= 6
    assert len(set(counts)) == 1
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[key], rtol=1e-4, atol=1e-6)


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}


def whole_of(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_tensor_parallel(device, path, name):
    ids, labels = (x.to(device) for x in make_batch())
    whole = make_model(name, **HEADS).to(device)
    expected, yard = gradients_of(whole, input_ids=ids, labels=labels)
    _, truth = gradients_of(copy.deepcopy(whole).double(), input_ids=ids, labels=labels)
    kind, names = type(whole), ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    with pytest.MonkeyPatch.context() as patched:
        # what a launcher would set
        for variable, value in zip(names, (dist.get_rank(), dist.get_rank(), dist.get_world_size()), strict=True):
            patched.setenv(variable, str(value))
        plan = transformers.distributed.DistributedConfig(tp_plan="auto")
        model = kind.from_pretrained(path, distributed_config=plan)
    unpatched = model.eval()(ids).logits
    # sharded layers add up in another order
    _, theirs = gradients_of(model.train(), input_ids=ids, labels=labels)
    theirs = {name: whole_of(gradient) for name, gradient in theirs.items()}
    handle = patch(model.train())
    assert "a DTensor" in repr(handle)
    loss, ours = gradients_of(model, input_ids=ids, labels=labels)
    torch.testing.assert_close(loss, expected, rtol=LOSS, atol=0)
    for parameter_name, gradient in ours.items():
        gradient = whole_of(gradient)
        true, own = truth[parameter_name].double(), yard[parameter_name]
        assert_gradient(gradient, true, [own, theirs[parameter_name]], parameter_name, largest_logit=10.0)
    assert torch.equal(model.eval()(ids).logits, unpatched)
    with torch.no_grad():
        skipped = model(ids, labels=labels, skip_logits=True)
    torch.testing.assert_close(skipped.loss, expected, rtol=LOSS, atol=0)


@pytest.mark.parametrize("name", ["Llama", pytest.param("Gemma2", marks=pytest.mark.slow)])
def test_transformers_own_tensor_parallelism(world, shared_path, name) -> None:
    if world.size not in (2, 4):
        pytest.skip("four heads of attention are to be divided")
    make_model(name, **HEADS).save_pretrained(shared_path)
    world.run(check_tensor_parallel, shared_path, name)


def check_wrapped(device, wrapper, order):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ids, labels = (x.to(device) for x in make_batch())
    for name in ("Llama", "Gemma2"):
        model = make_model(name).to(device)
        yard_loss, yard = gradients_of(model, input_ids=ids, labels=labels)
        _, truth = gradients_of(copy.deepcopy(model).double(), input_ids=ids, labels=labels)
        model.zero_grad()
        trained = model
        if order == "before":
            patch(model)
        if wrapper == "ddp":
            trained = torch.nn.parallel.DistributedDataParallel(model)
        else:
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            # Gemma-2's is tied
            own = [model.lm_head] if name == "Llama" else []
            for module in (*model.model.layers, *own, model):
                fully_shard(module, mesh=mesh)
        if order == "after":
            patch(trained)
        loss = trained(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.testing.assert_close(loss, yard_loss, rtol=LOSS, atol=0)
        for key, parameter in model.named_parameters():
            assert_gradient(whole_of(parameter.grad), truth[key].double(), [yard[key]], key, largest_logit=10.0)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_data_parallel_wrappers(world, wrapper, order) -> None:
    world.run(check_wrapped, wrapper, order)


def check_shard(device):
    ids, labels = (x.to(device) for x in make_batch())
    model = make_model().to(device)
    expected, theirs = gradients_of(model, input_ids=ids, labels=labels)
    shard = VocabShard.even(VOCAB, dist.group.WORLD)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach()[shard.start : shard.stop].clone())
    with pytest.raises(ValueError, match=r"lm_head.weight has \d+ rows, the model's vocabulary 97, and nothing says"):
        patch(model)
    handle = patch(model, shard, skip_logits=True)
    assert repr(handle) == f"Patch(LlamaForCausalLM: lm_head, a shard, rows {shard.start}:{shard.stop} of 97)"
    loss, ours = gradients_of(model, input_ids=ids, labels=labels)
    torch.testing.assert_close(loss, expected, rtol=LOSS, atol=0)
    rows = theirs.pop("lm_head.weight")[shard.start : shard.stop]
    torch.testing.assert_close(ours.pop("lm_head.weight"), rows, rtol=1e-4, atol=1e-6)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_shard_of_ones_own(world) -> None:
    world.run(check_shard)
