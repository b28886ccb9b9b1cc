"""Hugging Face's Trainer and accelerate on one process, with a patched model."""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainer_jobs import (
    ACCUMULATE,
    ROWS,
    assert_same,
    make_rows,
    make_trainer,
    outcome_of,
    run_accelerate,
    run_alone,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(fp64, fp32) without a patch."""
    return [run_alone(tmp_path_factory.mktemp("run"), False, dtype) for dtype in (torch.float64, torch.float32)]


def test_trains_and_evaluates_as_unpatched(runs, tmp_path) -> None:
    truth, yard = runs
    assert truth.losses[-1] < 0.9 * truth.losses[0]
    assert 0 < truth.metrics["eval_accuracy"] < 1
    assert_same(run_alone(tmp_path, True), truth, yard)


def test_the_model_decides_on_logits(tmp_path, monkeypatch) -> None:
    widths = []
    head = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: widths.append(self.out_features) or head(self, x))
    # as the model is made, or a head's own forward would be taken for more than a linear layer
    trainer = make_trainer(tmp_path, True, max_steps=1)
    outcome_of(trainer)
    assert widths
    assert max(widths) < trainer.model.config.vocab_size


def test_bf16(tmp_path) -> None:
    """Under autocast a run's roundings are of its own: losses agree to one of bf16."""
    yard, found = (run_alone(tmp_path / str(patched), patched, bf16=True) for patched in (False, True))
    assert found.losses == pytest.approx(yard.losses, rel=torch.finfo(torch.bfloat16).eps / 2)
    assert found.metrics["eval_loss"] == pytest.approx(yard.metrics["eval_loss"], rel=2**-9)


def test_saves_and_resumes(tmp_path) -> None:
    straight = make_trainer(tmp_path / "straight", True, batch=ROWS, save_strategy="steps")
    whole = outcome_of(straight)
    resumed = make_trainer(tmp_path / "resumed", True, batch=ROWS)
    again = outcome_of(resumed, str(tmp_path / "straight" / "checkpoint-2"))
    assert again.losses == whole.losses
    for (name, ours), theirs in zip(resumed.model.named_parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    resumed.save_model(tmp_path / "saved")
    loaded = type(resumed.model).from_pretrained(tmp_path / "saved")
    ids = torch.tensor([make_rows(1)[0]["input_ids"]])
    assert torch.equal(loaded(ids).logits, resumed.model.eval()(ids).logits)


def test_accelerate() -> None:
    from accelerate import Accelerator

    def train(patched, dtype=torch.float32):
        return run_accelerate(
            Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE), patched, ROWS // 2, dtype
        )

    assert_same(train(True), train(False, torch.float64), train(False))


@pytest.mark.slow
def test_the_example_runs(tmp_path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "text").mkdir()
    for module in (argparse, ast, inspect):
        shutil.copy(module.__file__, tmp_path / "text")
    script = Path(__file__).parents[1] / "launch" / "finetune_trainer.py"
    options = [
        "--data",
        tmp_path / "text",
        "--output",
        tmp_path / "run",
        "--steps",
        30,
        "--length",
        64,
        "--rate",
        3e-3,
    ]
    done = subprocess.run(
        [sys.executable, script, *map(str, options)], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert "Patch(LlamaForCausalLM: lm_head, whole)" in done.stdout
    metrics = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    assert metrics["eval_loss"] < 7.0 < math.log(4096)
    assert metrics["eval_accuracy"] > 0.02
    assert metrics["eval_entropy"] > 0
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
