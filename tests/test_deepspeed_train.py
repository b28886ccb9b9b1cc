"""launch/train_deepspeed.py as a person runs it, and its losses beside those of launch/train.py."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from deepspeed_jobs import clean_state

for library in ("tokenizers", "matplotlib", "tqdm"):
    pytest.importorskip(library)

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "launch"
STEPS, SAVE_EVERY = 8, 4
JOB = ["--preset", "micro", "--vocab-size", "601", "--steps", STEPS, "--warmup", 2, "--save-every", SAVE_EVERY]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    (folder / "text").mkdir()
    for module in ("argparse", "ast", "inspect"):
        shutil.copy(importlib.import_module(module).__file__, folder / "text")
    return folder


def options_of(folder, *options):
    return [str(o) for o in (*JOB, "--data", folder / "text", "--runs", folder / "runs", *options)]


def start(launcher, folder, *options):
    outer = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    # the CPU's ranks have no GPU to be counted
    environment = outer | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *launcher, str(LAUNCH / "train_deepspeed.py"), *options_of(folder, *options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.skipif("RANK" in os.environ, reason="is inside a torchrun job")
def test_goes_on_with_the_same_bits(folder) -> None:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    config = ["--config", LAUNCH / "ds_zero3.json"]
    told = start(torchrun, folder, *config, "--name", "unbroken", "--batch", 2, "--tied")
    assert (
        "computes the loss in lm_head, whole (all of 601 classes, tied to model.embed_tokens); ZeRO stage 3" in told
    )
    run = folder / "runs" / "unbroken"
    found = losses(run)
    assert len(found) == STEPS
    assert found[-1] < found[0] - 0.2
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == [f"step-{SAVE_EVERY:06d}", f"step-{STEPS:06d}"]
    # as if it had been killed before the last checkpoint was whole
    broken = shutil.copytree(run, folder / "runs" / "broken")
    shutil.rmtree(broken / "checkpoints" / kept[1])
    (broken / "metrics.jsonl").write_text("".join((run / "metrics.jsonl").open().readlines()[: SAVE_EVERY + 1]))
    launcher = ["deepspeed.launcher.runner", "--num_gpus", "2"]
    start(launcher, folder, *config, "--name", "broken", "--batch", 2, "--tied", "--resume")
    assert losses(broken) == found


def check_layouts(device, folder, jobs):
    patch = pytest.MonkeyPatch()
    try:
        patch.syspath_prepend(str(LAUNCH))
        patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
        plain, engine = importlib.import_module("train"), importlib.import_module("train_deepspeed")
        # eight sequences a step in each
        plain.train(plain.parse_args(options_of(folder, "--name", "plain", "--fsdp", 2, "--batch", 2)), device)
        for name, options in jobs.items():
            args = engine.parse_args(options_of(folder, "--name", name, *options))
            with clean_state():
                plain.train(args, device, engine.EngineTrainer)
    finally:
        patch.undo()


def small_buckets(name, folder):
    """A config of launch/, whose buffers would be of gigabytes, and filled, since memory is poisoned here."""
    config = json.loads((LAUNCH / f"ds_{name}.json").read_text())
    config["zero_optimization"]["reduce_bucket_size"] = 100_000
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return path


def test_trains_what_train_py_trains(world, folder, tmp_path) -> None:
    if world.size != 4:
        pytest.skip("eight sequences a step on four ranks")
    options = {
        "zero1": ["--batch", 2],
        "zero2": ["--batch", 1, "--accumulate", 2],
        "zero3": ["--batch", 2],
        "autotp": ["--batch", 2, "--accumulate", 2],
    }
    jobs = {name: ["--config", small_buckets(name, tmp_path), *options[name]] for name in options}
    world.run(check_layouts, folder, jobs)
    expected = losses(folder / "runs" / "plain")
    for name in jobs:
        assert losses(folder / "runs" / name) == pytest.approx(expected, abs=1e-5), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "{tmp}/none.json"], "argument --config: {tmp}/none.json does not exist; expected a DeepSpeed"),
        (["--config", "{tmp}/list.json"], "argument --config: {tmp}/list.json is no DeepSpeed config: "),
        (["--config", "{tmp}/three.json"], "argument --tp: expected a divisor of the 2 ranks, got 3"),
    ],
)
def test_bad_configs(options, message, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(LAUNCH))
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "three.json").write_text('{"tensor_parallel": {"autotp_size": 3}}')
    script = importlib.import_module("train_deepspeed")
    with pytest.raises(SystemExit):
        script.parse_args([option.format(tmp=tmp_path) for option in options])
    assert message.format(tmp=tmp_path) in capsys.readouterr().err


def test_goes_on_in_the_same_layout_only(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(LAUNCH))
    train, script = importlib.import_module("train"), importlib.import_module("train_deepspeed")
    old = {"preset": "tiny", "vocab_size": 601, "tied": False, "text": "a", "tp": 1, "dp": 2, "deepspeed": {"z": 3}}
    train.check_config(old, {**old, "steps": 9}, script.EngineTrainer.settings)
    with pytest.raises(ValueError, match=r"the run was started with deepspeed \{'z': 3\}, got \{'z': 1\}"):
        train.check_config(old, {**old, "deepspeed": {"z": 1}}, script.EngineTrainer.settings)
