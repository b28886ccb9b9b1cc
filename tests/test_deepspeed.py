"""Training under the real DeepSpeed, on four ranks, against one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from deepspeed_jobs import (
    IGNORED,
    Job,
    all_jobs,
    assert_within,
    clean_state,
    libraries,
    make_engine,
    make_model,
    measure,
    run_step,
)

from cce_dist import reference
from cce_dist.integrations.deepspeed import head_loss, prepare


def check_job(device, job, prepare="after"):
    assert_within(job, *measure(job, device, prepare))


def in_every_run(job):
    """Enough of all jobs that each mode meets the first and the last stage, and a tie; all are run with --slow."""
    return job.dtype == "fp32" and job.parallel < 4 and (job.stage, job.tied) in ((1, False), (3, True))


@pytest.mark.parametrize(
    "job", [pytest.param(j, id=str(j), marks=() if in_every_run(j) else pytest.mark.slow) for j in all_jobs()]
)
def test_trains_as_one_process(world, job) -> None:
    if world.size % job.parallel:
        pytest.skip(f"needs a multiple of {job.parallel} ranks, there are {world.size}")
    world.run(check_job, job)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        Job("zero", 2, clip=1.0, offload=True),
        Job("zero", 3, "bf16", tied=True, clip=1.0, offload=True),
        # recomputed in backward, where the weight must be gathered again, and all kept from forward
        Job("zero", 3, method="recompute"),
        Job("zero", 3, method="cached", tied=True),
        Job("autotp-vocab", 3, parallel=2, method="recompute", tied=True),
        Job("zero", 3, frozen=True),
        Job("mpu", 1, parallel=2, frozen=True, clip=1.0),
        # shards of equal size
        Job("mpu", 3, parallel=2, vocab=204, clip=1.0),
        Job("autotp-vocab", 1, parallel=2, init="tp_model_init", clip=1.0),
        Job("autotp-vocab", 3, parallel=2, init="tp_model_init", tied=True),
    ],
    ids=str,
)
def test_trains_as_one_process_with(world, job) -> None:
    if world.size % job.parallel:
        pytest.skip(f"needs a multiple of {job.parallel} ranks, there are {world.size}")
    world.run(check_job, job)


@pytest.mark.parametrize(
    "job",
    [Job("zero", 3, tied=True), Job("autotp-vocab", 1, parallel=2, tied=True), Job("mpu", 3, parallel=2)],
    ids=str,
)
def test_prepared_before_the_engine(world, job) -> None:
    world.run(check_job, job, "before")


def check_overflow(device):
    job = Job("zero", 3, "fp16")
    with clean_state():
        # half the largest step that fp16 has: the first steps overflow
        engine = make_engine(job, device, fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1})
        skipped = 0
        for _ in range(12):
            run_step(job, engine, 0, device)
            engine.step()
            skipped += engine.optimizer.overflow
        assert 0 < skipped < 12
        assert engine.optimizer.loss_scale == 2.0 ** (24 - skipped)
        assert engine.skipped_steps == skipped
        first = run_step(job, engine, 0, device)
        assert first < 4.5, "the steps after the skipped ones have trained"


def test_fp16_skips_steps_that_overflow(world) -> None:
    world.run(check_overflow)


def check_gathers(device):
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    job = Job("zero", 3, accumulate=1, method="recompute")
    gathers, reductions = [], []
    name = "_PartitionedParameterCoordinator__all_gather_params"
    gather = getattr(Coordinator, name)
    with clean_state(), pytest.MonkeyPatch.context() as patch:
        engine = make_engine(job, device)
        weight = engine.module.lm_head.weight

        def spy(self, params, forward):
            gathers.extend(p for p in params if p is weight and p.ds_status.name == "NOT_AVAILABLE")
            return gather(self, params, forward)

        patch.setattr(Coordinator, name, spy)
        weight.register_post_accumulate_grad_hook(lambda _: reductions.append(1))
        for step in range(3):
            gathers.clear()
            reductions.clear()
            run_step(job, engine, step, device)
            engine.step()
            assert len(gathers) == len(reductions) == 1


def test_one_gather_and_one_reduction_of_the_head_a_step(world) -> None:
    world.run(check_gathers)


def check_ignored(device):
    job = Job("zero", 3)
    with clean_state():
        engine = make_engine(job, device)
        ids = torch.randint(job.vocab, (2, 8), generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
        labels = ids if dist.get_rank() else torch.full_like(ids, IGNORED)
        loss = engine(input_ids=ids, labels=labels).loss
        assert (loss == 0) == (dist.get_rank() == 0)
        engine.backward(loss)
        engine.step()
        assert 0 < engine.get_global_grad_norm() < 100


def test_a_rank_without_a_token(world) -> None:
    world.run(check_ignored)


def check_evaluation(device, job):
    whole = make_model(job.tied, job.vocab).eval().to(device)
    ids = torch.randint(job.vocab, (2, 8), generator=torch.Generator().manual_seed(5)).to(device)
    expected = whole(input_ids=ids, labels=ids)
    with clean_state():
        engine = make_engine(job, device)
        trained = engine(input_ids=ids, labels=ids)
        assert trained.logits.shape == (2, 8, 0)
        torch.testing.assert_close(trained.loss, expected.loss, rtol=1e-5, atol=0)
        engine.backward(trained.loss)
        engine.eval()
        with torch.no_grad():
            output = engine(input_ids=ids, labels=ids)
            torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=0)
            # AutoTP's sharded head keeps the logits apart
            if job.mode != "autotp-vocab":
                torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-5)
                chosen = engine(input_ids=ids).logits.argmax(-1)
                assert torch.equal(chosen, expected.logits.argmax(-1))
        engine.train()
        again = engine(input_ids=ids, labels=ids)
        assert again.logits.shape == (2, 8, 0)


@pytest.mark.parametrize(
    "job",
    [Job("zero", 3), Job("autotp", 1, parallel=2), Job("autotp-vocab", 3, parallel=2), Job("mpu", 3, parallel=2)],
    ids=str,
)
def test_evaluates_with_logits(world, job) -> None:
    world.run(check_evaluation, job)


class OwnModel(torch.nn.Module):
    """No model of Hugging Face's: its forward asks the head for the loss."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = torch.nn.Embedding(vocab, 32)
        self.body = torch.nn.Linear(32, 32)
        self.out = torch.nn.Linear(32, vocab)

    def forward(self, ids, targets, **options):
        return head_loss(self.out, self.body(self.embed(ids)).tanh(), targets, **options)


def check_own_model(device, stage):
    deepspeed = libraries()
    from deepspeed.utils import safe_get_full_grad

    ids = torch.randint(101, (3, 9), generator=torch.Generator().manual_seed(6)).to(device)
    targets = ids.roll(-1, 1).masked_fill(ids % 5 == 0, -1)
    truth = OwnModel(101).double().to(device)
    hidden = truth.body(truth.embed(ids)).tanh()
    expected = reference.linear_cross_entropy(
        hidden, truth.out.weight, targets, bias=truth.out.bias, ignore_index=-1, dtype=torch.float64
    )
    expected.backward()
    with clean_state():
        model = OwnModel(101).to(device)
        config = {
            "train_micro_batch_size_per_gpu": 3,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        path = prepare(engine, head="out", ignore_index=-1)
        assert str(path) == f"head_loss computes the loss in out, whole (all of 101 classes); ZeRO stage {stage}"
        losses = engine(ids, targets, reduction="none")
        assert losses.shape == targets.shape
        engine.backward(losses.sum() / (targets != -1).sum())
        for name, parameter in engine.module.named_parameters():
            grad = truth.get_parameter(name).grad
            assert (safe_get_full_grad(parameter) - grad).norm() <= 1e-6 * grad.norm(), name
        torch.testing.assert_close(engine(ids, targets).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_model_of_ones_own(world, stage) -> None:
    world.run(check_own_model, stage)


def check_copy(device):
    model = make_model(False, 203)
    prepare(model)
    ids = torch.arange(16).view(2, 8)
    other = copy.deepcopy(model)
    model(input_ids=ids, labels=ids).loss.backward()
    other = copy.deepcopy(model)
    other.zero_grad()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    other(ids, labels=ids).loss.backward()
    assert other.lm_head.weight.grad.norm() > 0
    assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(torch.tensor(203.0).log().item(), rel=1e-6)
    assert other(input_ids=ids, labels=ids).loss.item() != pytest.approx(torch.tensor(203.0).log().item(), rel=1e-3)


def test_a_copied_model_has_its_own_head(world) -> None:
    world.run(check_copy)


def test_labels_are_taken_as_the_model_takes_them() -> None:
    model = make_model(False, 203)
    ids = torch.randint(203, (2, 8), generator=torch.Generator().manual_seed(5))
    labels = ids.masked_fill(ids % 3 == 0, IGNORED)
    with torch.no_grad():
        mean = model(input_ids=ids, labels=labels).loss.item()
        total = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(1.0)).loss.item()
    prepare(model, memory_budget="min", method="recompute")
    shifted = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    for inputs, expected in (
        ({"labels": labels}, mean),
        ({"labels": labels, "num_items_in_batch": torch.tensor(1.0)}, total),
        ({"shift_labels": shifted}, mean),
        # as Trainer passes them
        ({"shift_labels": shifted, "labels": shifted}, mean),
    ):
        assert model(ids, **inputs).loss.item() == pytest.approx(expected, rel=1e-6)
    assert model(ids, labels=labels, return_dict=False)[0].item() == pytest.approx(mean, rel=1e-6)
    assert model(ids).logits.shape == (2, 8, 203)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Gemma2", {"head_dim": 16, "final_logit_softcapping": 2.0}),
        ("Cohere", {"logit_scale": 0.25, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
        ("Granite", {"logits_scaling": 3.0}),
    ],
)
def test_scaled_and_capped_models(name, options) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=97, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.3, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    ids = torch.arange(16).view(2, 8)
    expected = model(input_ids=ids, labels=ids).loss.item()
    prepare(model)
    assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(expected, rel=1e-6)


def test_a_sum_of_auxiliary_losses_stays() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=3, output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).train()
    ids = torch.arange(16).view(2, 8)
    expected = model(input_ids=ids, labels=ids)
    assert expected.aux_loss > 0.1
    prepare(model)
    assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
