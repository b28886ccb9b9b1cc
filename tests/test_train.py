"""launch/train.py as a person runs it: under torchrun, killed, resumed, resumed on another number of ranks."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

for library in ("transformers", "tokenizers", "matplotlib", "tqdm"):
    pytest.importorskip(library)

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "launch" / "train.py"
STEPS, SAVE_EVERY, KILLED_AT = 24, 4, 10
JOB = ["--preset", "micro", "--vocab-size", "601", "--steps", str(STEPS), "--warmup", "4", "--batch", "4"]


def environment() -> dict[str, str]:
    outer = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return outer | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def command(ranks: int, *options: object) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, str(TRAIN), *JOB, *map(str, options)]


def train(ranks: int, *options: object) -> str:
    done = subprocess.run(
        command(ranks, *options), env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in metrics(run)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds text/ with some of the standard library's sources, and runs/."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "text").mkdir()
    for module in ("argparse", "ast", "decimal", "inspect", "tarfile", "typing"):
        source = importlib.import_module("_pydecimal" if module == "decimal" else module).__file__
        assert source is not None
        shutil.copy(source, folder / "text")
    return folder


@pytest.fixture(scope="module")
def common(folder: Path) -> list[object]:
    return ["--data", folder / "text", "--runs", folder / "runs"]


@pytest.fixture(scope="module")
def unbroken(folder: Path, common: list[object]) -> tuple[Path, str]:
    """(the run of two ranks that share a vocabulary, what its comparison printed)."""
    told = train(2, *common, "--name", "unbroken", "--tp", 2, "--save-every", STEPS, "--compare")
    return folder / "runs" / "unbroken", told


@pytest.fixture(scope="module")
def killed(folder: Path, common: list[object], unbroken: tuple[Path, str]) -> Path:
    """The same run, killed past a checkpoint, with a half-written later checkpoint."""
    run = folder / "runs" / "killed"
    options = [*common, "--name", "killed", "--tp", 2, "--save-every", SAVE_EVERY]
    with subprocess.Popen(
        command(2, *options), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as job:  # fmt: skip
        deadline = time.monotonic() + 120
        while (
            not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < KILLED_AT
        ):
            assert job.poll() is None, "the run ended before it was killed"
            assert time.monotonic() < deadline, "the run did not get as far as it should be killed"
            time.sleep(0.005)
        # its ranks are in sessions of their own
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        for pid in (job.pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
    last = max((run / "checkpoints").glob(f"step-{'[0-9]' * 6}"))
    assert last.name < f"step-{STEPS:06d}", "killed too late to tell anything"
    shutil.copytree(last, run / "checkpoints" / f"step-{STEPS - 1:06d}.partial")
    return run


def test_loss_falls_and_the_run_is_recorded(unbroken: tuple[Path, str]) -> None:
    run, _ = unbroken
    records = metrics(run)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    for record in records:
        assert 100 < record["tokens"] <= 4 * 32
        assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["seconds"])
        assert record["peak_memory"] > 1 << 20
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "config.json").read_text())["vocab_size"] == 601
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{STEPS:06d}"]


def test_comparison_with_materialised_logits(unbroken: tuple[Path, str]) -> None:
    run, told = unbroken
    other = losses(run.with_name("unbroken-materialised"))
    assert losses(run) == pytest.approx(other, abs=1e-4)
    assert "largest difference in loss over 24 steps:" in told
    assert "peak memory of a rank" in told
    assert str(run / "loss.png") in told


@pytest.mark.slow
def test_tied_replicas_are_the_same_training(folder: Path, common: list[object]) -> None:
    layout = ["--tp", 2, "--fsdp", 2, "--accumulate", 3, "--batch", 1]
    train(4, *common, "--name", "tied", "--tied", *layout, "--steps", 6, "--compare")
    tied = folder / "runs" / "tied"
    assert losses(tied) == pytest.approx(losses(tied.with_name("tied-materialised")), abs=1e-4)


@pytest.mark.slow
def test_resumes_without_tensor_parallelism(unbroken: tuple[Path, str], killed: Path, common: list[object]) -> None:
    # the same four sequences a step: two replicas with two micro-batches of one sequence
    run = shutil.copytree(killed, killed.with_name("replicas"))
    train(2, *common, "--name", "replicas", "--tp", 1, "--batch", 1, "--accumulate", 2, "--resume")
    assert losses(run) == pytest.approx(losses(unbroken[0]), abs=1e-5)


def test_resumes_after_a_kill_with_the_same_bits(
    unbroken: tuple[Path, str], killed: Path, common: list[object]
) -> None:
    # a copy, so that the tests may run in any order
    run = shutil.copytree(killed, killed.with_name("resumed"))
    train(2, *common, "--name", "resumed", "--tp", 2, "--resume", "--save-every", SAVE_EVERY)
    assert losses(run) == losses(unbroken[0])
    # the last two are kept, the half-written one is gone
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == [f"step-{STEPS - SAVE_EVERY:06d}", f"step-{STEPS:06d}"]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_killed_at_fifty_instants(folder: Path, common: list[object]) -> None:
    """Whatever it was doing, writing a checkpoint among it: the same losses, to the last bit."""
    # more of them than a run gets to before its kills
    options, instants = [*common, "--steps", 400], random.Random(0)
    train(1, *options, "--name", "whole", "--save-every", 400)
    run, saving = folder / "runs" / "broken", ("--name", "broken", "--save-every", 2)
    metrics_file = run / "metrics.jsonl"
    for _ in range(50):
        resume = ["--resume"] if [*(run / "checkpoints").glob(f"step-{'[0-9]' * 6}")] else ["--overwrite"]
        before = metrics_file.stat().st_mtime_ns if metrics_file.exists() else 0
        with subprocess.Popen(
            command(1, *options, *saving, *resume), env=environment(), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as job:  # fmt: skip
            deadline = time.monotonic() + 120
            while not metrics_file.exists() or metrics_file.stat().st_mtime_ns == before:
                assert job.poll() is None, "the run ended before it was killed"
                assert time.monotonic() < deadline, "the run did not begin"
                time.sleep(0.005)
            time.sleep(instants.random())
            assert job.poll() is None, "the run ended before it was killed"
            job.kill()
    # the last line may be half of one
    assert 50 < len(metrics_file.read_text().splitlines()) < 400
    train(1, *options, *saving, "--resume")
    assert losses(run) == losses(folder / "runs" / "whole")


def check_goes_on(group: dist.ProcessGroup, device: torch.device, options: list[str]) -> None:
    # in the ranks that are there: three jobs of four processes each would take most of their time to start
    patch = pytest.MonkeyPatch()
    try:
        patch.syspath_prepend(str(TRAIN.parent))
        patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
        script = importlib.import_module("train")
        script.train(script.parse_args([*JOB, *options]), device)
    finally:
        patch.undo()


@pytest.mark.slow
def test_goes_on_in_any_layout(ranks: Any, unbroken: tuple[Path, str], killed: Path, common: list[object]) -> None:
    # four sequences a step in each. One layout goes on from what the one before has written
    run = shutil.copytree(killed, killed.with_name("layouts"))
    for save_every, layout in (
        (8, ["--tp", 2, "--fsdp", 2, "--batch", 1, "--accumulate", 2]),
        (4, ["--tp", 4, "--batch", 4]),
        (2, ["--dp", 2, "--fsdp", 2, "--batch", 1]),
    ):
        options = [*common, "--name", "layouts", *layout, "--resume", "--save-every", save_every]
        ranks.run(check_goes_on, [str(option) for option in options], ranks=4, timeout=240)
        assert losses(run) == pytest.approx(losses(unbroken[0]), abs=1e-5)
        shutil.rmtree(run / "checkpoints" / f"step-{STEPS:06d}")
        left = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert left == [f"step-{STEPS - save_every:06d}"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """train.py as a module, in a job of two ranks."""
    monkeypatch.syspath_prepend(str(TRAIN.parent))
    monkeypatch.setenv("WORLD_SIZE", "2")
    return importlib.import_module("train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "3"], "argument --tp: expected a divisor of the 2 ranks, got 3"),
        (["--fsdp", "4"], "arguments --tp, --fsdp, --dp: expected a product of 2, the count of ranks, got 1 x 4 x 1"),
        (["--dp", "1"], "arguments --tp, --fsdp, --dp: expected a product of 2, the count of ranks, got 1 x 1 x 1"),
        (["--tp", "0"], "argument --tp: expected at least 1, got 0"),
        (["--preset", "huge"], "argument --preset: invalid choice: 'huge'"),
        (["--vocab-size", "256"], "argument --vocab-size: expected at least 257, got 256"),
        (["--head", "materialised", "--tp", "2"], "argument --head: materialised logits are for --tp 1, got --tp 2"),
        (["--name", "../x"], "argument --name: expected a name without a folder, got '../x'"),
        (["--data", "nowhere"], "--data: nowhere does not exist"),
        (["--data", "{tmp}"], "--data: no text files in {tmp}"),
        (["--resume"], "argument --resume: {tmp}/tiny has no complete checkpoint"),
        (
            ["--name", "old"],
            "{tmp}/old has checkpoints: pass --resume to go on, --overwrite to start anew, or --name",
        ),
    ],
)
def test_bad_options(
    script: ModuleType, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "image.bin").write_bytes(b"\x89\0\1")
    (tmp_path / "old" / "checkpoints" / "step-000010").mkdir(parents=True)
    (tmp_path / "tiny" / "checkpoints" / "step-000010.partial").mkdir(parents=True)
    with pytest.raises(SystemExit):
        script.parse_args(["--runs", str(tmp_path), *(option.format(tmp=tmp_path) for option in options)])
    assert message.format(tmp=tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("preset", "tp", "message"),
    [
        ("small", 8, "argument --tp: expected a divisor of small's 12 attention heads, got 8"),
        ("small", 6, "argument --tp: expected a divisor of small's 2048 features of the MLP, got 6"),
        ("micro", 3, "argument --tp: expected a divisor of micro's 4 attention heads, got 3"),
    ],
)
def test_parts_that_ranks_can_not_share(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    preset: str,
    tp: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "24")
    with pytest.raises(SystemExit):
        script.parse_args(["--runs", str(tmp_path), "--preset", preset, "--tp", str(tp)])
    assert message in capsys.readouterr().err


def test_resumes_the_same_model_only(script: ModuleType) -> None:
    old = {"preset": "tiny", "vocab_size": 32768, "tied": False, "text": "abc-32768"}
    script.check_config(old, {**old, "steps": 100})
    with pytest.raises(ValueError, match="--resume: the run was started with tied False, got True"):
        script.check_config(old, {**old, "tied": True})


def test_too_little_text(script: ModuleType) -> None:
    with pytest.raises(
        ValueError, match="--data: 20 tokens make 4 sequences of 4, expected at least the 5 of a batch"
    ):
        script.Batches(torch.ones(20, dtype=torch.int32), length=4, batch=5, seed=0)


def test_batches_depend_on_their_number_alone(script: ModuleType) -> None:
    # a border after each nine tokens
    tokens = torch.tensor(([*range(1, 10), 0]) * 13, dtype=torch.int32)
    forwards = script.Batches(tokens, length=4, batch=3, seed=7)
    backwards = script.Batches(tokens, length=4, batch=3, seed=7)
    # over several epochs of 32 sequences
    there = [forwards(number) for number in range(40)]
    back = [backwards(number) for number in reversed(range(40))][::-1]
    for (ids, labels), (same_ids, same_labels) in zip(there, back, strict=True):
        assert torch.equal(ids, same_ids)
        assert torch.equal(labels, same_labels)
        assert torch.equal(labels == -100, ids == 0)
        assert torch.equal(labels[ids != 0], (ids[ids != 0] + 1) % 10)
    assert not torch.equal(there[0][0], there[1][0])
    assert not torch.equal(there[0][0], script.Batches(tokens, length=4, batch=3, seed=8)(0)[0])
