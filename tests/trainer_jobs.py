"""Runs of Hugging Face's Trainer, with the patch and without."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from inputs import IGNORED
from tolerance import LOSS, assert_gradient

from cce_dist import TokenStats
from cce_dist.integrations.transformers import patch

if not all(importlib.util.find_spec(name) for name in ("transformers", "accelerate")):
    # of the test file that imports this one. Found, not imported: the ranks need them too
    pytest.skip("needs the extra train", allow_module_level=True)

VOCAB, LENGTH, STEPS, ACCUMULATE, ROWS = 101, 12, 4, 2, 8


@dataclasses.dataclass
class Outcome:
    """Of a run: losses and norms of the steps, the way that each weight went, the evaluation's metrics."""

    losses: list[float]
    norms: list[float]
    moved: dict[str, torch.Tensor]
    metrics: dict[str, float]


def make_model() -> Any:
    import transformers

    config = transformers.Gemma2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, initializer_range=0.2, final_logit_softcapping=3.0, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Gemma2ForCausalLM(config)


def make_rows(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Counts up from somewhere, with unequal counts of labels."""
    starts = torch.randint(20, (count,), generator=torch.Generator().manual_seed(seed))
    rows = []
    for index, start in enumerate(starts):
        ids = 3 + (start + torch.arange(LENGTH)) % 20
        labels = ids.clone()
        labels[: 1 + 5 * index % 9] = IGNORED
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def accuracy(prediction: Any) -> dict[str, float]:
    """Of the logits, or of the statistics in their place."""
    labels = prediction.label_ids[:, 1:]
    if isinstance(prediction.predictions, tuple):
        stats = TokenStats(*prediction.predictions)
        assert stats.argmax.shape == prediction.label_ids.shape
        chosen, log_prob = stats.argmax[:, :-1], stats.log_prob[:, :-1]
    else:
        logits = torch.from_numpy(prediction.predictions)[:, :-1]
        chosen = logits.argmax(-1).numpy()
        targets = torch.from_numpy(labels).clamp(0)[..., None]
        log_prob = logits.log_softmax(-1).gather(-1, targets)[..., 0].numpy()
    valid = labels != IGNORED
    return {"accuracy": float((chosen == labels)[valid].mean()), "log_prob": float(log_prob[valid].mean())}


def make_trainer(folder: Path, patched: bool, model: Any = None, batch: int = ROWS // 2, **config: Any) -> Any:
    import transformers

    config = {
        "per_device_train_batch_size": batch, "per_device_eval_batch_size": batch, "max_steps": STEPS, "optim": "sgd",
        "gradient_accumulation_steps": ACCUMULATE, "learning_rate": 0.5, "lr_scheduler_type": "constant",
        "logging_steps": 1, "save_steps": 2, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "max_grad_norm": 1.0, "seed": 3, "logging_nan_inf_filter": False, **config,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(str(folder), **config)
    model = make_model() if model is None else model
    if patched:
        patch(model, skip_logits=True, return_stats=True)
    return transformers.Trainer(
        model, arguments, train_dataset=make_rows(STEPS * ACCUMULATE * ROWS), eval_dataset=make_rows(ROWS, seed=1),
        compute_metrics=accuracy,
    )  # fmt: skip


def outcome_of(trainer: Any, resume: str | None = None) -> Outcome:
    """Trains and evaluates."""
    trainer.train(resume_from_checkpoint=resume)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    metrics = {k: v for k, v in trainer.evaluate().items() if k in ("eval_loss", "eval_accuracy", "eval_log_prob")}
    return Outcome([e["loss"] for e in log], [float(e["grad_norm"]) for e in log], {}, metrics)


def moved(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    start = dict(make_model().named_parameters())
    return {name: weights[name].detach().double() - p.detach().double() for name, p in start.items()}


def run_alone(folder: Path, patched: bool, dtype: torch.dtype = torch.float32, **config: Any) -> Outcome:
    """One process, a whole step's rows at a time."""
    trainer = make_trainer(folder, patched, make_model().to(dtype), ROWS, **config)
    outcome = outcome_of(trainer)
    outcome.moved = moved(dict(trainer.model.named_parameters()))
    return outcome


def run_accelerate(accelerator: Any, patched: bool, batch: int, dtype: torch.dtype = torch.float32) -> Outcome:
    """The loop that accelerate's documentation shows, with a step's count of labels."""
    from transformers import default_data_collator

    model = make_model().train().to(dtype)
    if patched:
        patch(model)
    rows = torch.utils.data.DataLoader(make_rows(STEPS * ROWS), batch, collate_fn=default_data_collator)
    model, optimizer, rows = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), rows)
    losses = []
    for inputs in rows:
        with accelerator.accumulate(model):
            loss = model(**inputs, num_items_in_batch=60 / accelerator.num_processes).loss
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            optimizer.step()
            optimizer.zero_grad()
    assert len(losses) * batch * accelerator.num_processes == STEPS * ROWS
    model = accelerator.unwrap_model(model)
    return Outcome(losses, [], moved(whole_weights(model)), {})


def whole_weights(model: Any) -> dict[str, torch.Tensor]:
    """Also where ZeRO-3 has spread them."""
    parameters = dict(model.named_parameters())
    if not hasattr(next(iter(parameters.values())), "ds_id"):
        return {name: p.detach().clone() for name, p in parameters.items()}
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: p.detach().clone() for name, p in parameters.items()}


def assert_same(found: Outcome, truth: Outcome, yard: Outcome, rounding: float = LOSS) -> None:
    """``found`` is as near to the truth in fp64 as ``yard``, an unpatched run; its losses within ``rounding``."""
    for ours, theirs in ((found.losses, truth.losses), (found.norms, truth.norms)):
        assert ours == pytest.approx(theirs, rel=rounding)
    assert found.metrics == pytest.approx(truth.metrics, rel=rounding)
    assert found.metrics.keys() == truth.metrics.keys()
    for name, way in truth.moved.items():
        # in fp32, as the weights are
        assert_gradient(found.moved[name].float(), way, [yard.moved[name]], name, largest_logit=10.0)
