"""Hugging Face's Trainer and accelerate on DeepSpeed's engine with a patched model, against one process without."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed_jobs import clean_state, libraries
from tolerance import LOSS, assert_gradient
from trainer_jobs import (
    ROWS,
    assert_same,
    make_model,
    make_trainer,
    moved,
    outcome_of,
    run_accelerate,
    run_alone,
    whole_weights,
)

from cce_dist.integrations.transformers import patch


@contextlib.contextmanager
def reset():
    """Before and after, nothing of what accelerate and transformers keep of a run."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    def forget():
        AcceleratorState._reset_state(True)
        unset_hf_deepspeed_config()
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            del os.environ[name]

    forget()
    try:
        yield
    finally:
        forget()


@contextlib.contextmanager
def launched():
    """What a launcher would set."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    with clean_state(), reset(), pytest.MonkeyPatch.context() as environment:
        for name, value in zip(names, (rank, rank, size, size, "127.0.0.1", "29500"), strict=True):
            environment.setenv(name, value)
        yield


def config_of(stage, **config):
    return {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_allow_untested_optimizer": True, "steps_per_print": 1 << 30,
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": 20000, "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        **config,
    }  # fmt: skip


@functools.cache
def run_of_one(path, job):
    """(fp64, fp32) of one process without a patch."""
    from accelerate import Accelerator

    def run(dtype):
        if job == "trainer":
            return run_alone(Path(path) / f"{dtype}{dist.get_rank()}", False, dtype)
        with reset():
            return run_accelerate(Accelerator(cpu=True), False, ROWS, dtype)

    with pytest.MonkeyPatch.context() as environment:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            environment.delenv(name, raising=False)
        with reset():
            return [run(dtype) for dtype in (torch.float64, torch.float32)]


def check_trainer(device, folder, stage):
    folder, batch = Path(folder), ROWS // dist.get_world_size()
    alone = run_of_one(str(folder), "trainer")
    with launched():
        trainer = make_trainer(
            folder / "straight", True, batch=batch, deepspeed=config_of(stage), save_strategy="steps"
        )
        found = outcome_of(trainer)
        assert trainer.model_wrapped.zero_optimization_stage() == stage
        weights = whole_weights(trainer.model)
        found.moved = moved(weights)
        assert_same(found, *alone)
        trainer.save_model(folder / "saved")
        dist.barrier()
    # in one piece, by a process that knows no DeepSpeed
    loaded = dict(type(make_model()).from_pretrained(folder / "saved").named_parameters())
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    with launched():
        again = make_trainer(folder / "resumed", True, batch=batch, deepspeed=config_of(stage))
        outcome = outcome_of(again, str(folder / "straight" / "checkpoint-2"))
        assert outcome.losses == found.losses
        assert outcome.metrics == found.metrics
        resumed = whole_weights(again.model)
        assert all(torch.equal(resumed[name], weights[name]) for name in weights)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_trainer(world, shared_path, stage) -> None:
    if ROWS % world.size:
        pytest.skip(f"{ROWS} rows are to be divided")
    world.run(check_trainer, str(shared_path), stage)


def check_accelerate(device, folder, stage):
    alone = run_of_one(folder, "accelerate")
    with launched():
        from accelerate import Accelerator, DeepSpeedPlugin

        batch = ROWS // dist.get_world_size()
        config = config_of(stage, gradient_accumulation_steps=1, train_micro_batch_size_per_gpu=batch)
        plugin = DeepSpeedPlugin(hf_ds_config=config | {"gradient_clipping": 0.0})
        found = run_accelerate(Accelerator(cpu=True, deepspeed_plugin=plugin), True, batch)
    assert_same(found, *alone)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_accelerate(world, shared_path, stage) -> None:
    if ROWS % world.size:
        pytest.skip(f"{ROWS} rows are to be divided")
    world.run(check_accelerate, str(shared_path), stage)


def check_kinds(device, kind):
    """The head's adapters, and a loss of experts that is added in place, under ZeRO-3."""
    deepspeed = libraries()
    import test_transformers as models
    from deepspeed.utils import safe_get_full_grad

    ids, labels = models.make_batch()
    model = models.adapted() if kind == "lora" else models.make_model(kind)
    truth_loss, truth = models.gradients_of(copy.deepcopy(model).double(), input_ids=ids, labels=labels)
    _, yard = models.gradients_of(model, input_ids=ids, labels=labels)
    model.zero_grad()
    patch(model)
    with clean_state():
        trained = [p for p in model.parameters() if p.requires_grad]
        config = config_of(3, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=1)
        config |= {"gradient_clipping": 0.0}
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(trained, lr=0.1), config=config)
        loss = engine(input_ids=ids, labels=labels).loss
        assert loss.item() == pytest.approx(truth_loss.item(), rel=LOSS)
        engine.backward(loss)
        for name, parameter in engine.module.named_parameters():
            if name in yard:
                found = safe_get_full_grad(parameter)
                assert_gradient(found, truth[name].double(), [yard[name]], name, largest_logit=10.0)
        engine.step()
        assert engine(input_ids=ids, labels=labels).loss < loss


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "Mixtral", "Granite"])
def test_kinds_of_models_at_stage_3(world, kind) -> None:
    if kind == "lora":
        pytest.importorskip("peft", reason="needs the extra train")
    world.run(check_kinds, kind)
