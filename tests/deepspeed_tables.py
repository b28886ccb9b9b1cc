"""Prints the tables of docs/deepspeed.md: every mode at every stage, in every dtype, untied and tied.

    PYTHONPATH=tests torchrun --nproc-per-node 4 tests/deepspeed_tables.py [MODE ... | checks]

A cell is the largest of three errors (of the head's gradient, of all gradients, of the weights after three steps),
each in units of the error that one process of the same dtype makes, or, under AutoTP, the same job with DeepSpeed's
own loss, if that is larger; all against one process in fp64. A star: DeepSpeed takes a wrong norm there. ``checks``:
pipelines, the Trainer and accelerate, and checkpoints, as their tests check them.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import test_deepspeed_checkpoints as checkpoints
import test_deepspeed_pipeline as pipelines
import test_deepspeed_trainer as trainers
import torch
import torch.distributed as dist
from deepspeed_jobs import Job, all_jobs, assert_within, measure, wrong_norm

NAMES = {
    "zero": "ZeRO alone",
    "autotp": 'AutoTP, `"vocab_parallel_lm_head": false`',
    "autotp-vocab": 'AutoTP, `"vocab_parallel_lm_head": true`',
    "mpu": "`mpu` and `shard_head`",
    "ulysses": "Ulysses",
}


ROWS = {"head": "head's gradient", "gradients": "all gradients", "weights": "weights after three steps"}


def measured(job: Job, device: torch.device) -> tuple[str, dict[str, float]]:
    errors, yardstick = measure(job, device)
    try:
        assert_within(job, errors, yardstick)
    except AssertionError as error:
        return f"wrong: {error}", yardstick
    ratio = max(errors[name] / yardstick[name] for name in ROWS)
    return f"{ratio:.2f}" + ("*" if wrong_norm(job) else ""), yardstick


def cases_of(test: Any) -> list[dict[str, Any]]:
    """The arguments that pytest runs a test with, the slow ones among them."""
    found: list[dict[str, Any]] = [{}]
    for mark in (mark for mark in test.pytestmark if mark.name == "parametrize"):
        names, values, *_ = mark.args
        names = [names] if isinstance(names, str) else names
        rows = [getattr(value, "values", value) for value in values]
        rows = [row if isinstance(row, (tuple, list)) else (row,) for row in rows]
        found = [{**case, **dict(zip(names, row, strict=True))} for case in found for row in rows]
    return found


def checks() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """What is checked, the check, and its arguments; ``folder`` stands for one that all ranks see."""
    for case in cases_of(pipelines.test_pipelines):
        tied, stage, tensor, clip = (case[name] for name in ("tied", "stage", "tensor", "clip"))
        title = f"two stages x {tensor} tensor-parallel, ZeRO {stage}, {'tied' if tied else 'untied'}, clip {clip}"
        yield f"pipeline: {title}", pipelines.check_pipeline, (stage, tied, tensor, clip)
    for case in cases_of(checkpoints.test_whole_weights_and_back):
        title = f"whole weights: `{case['job']}` to `{case['other']}`"
        yield title, checkpoints.check_whole, (case["job"], case["other"])
    for case in cases_of(checkpoints.test_goes_on_with_the_same_bits):
        yield f"resume: `{case['job']}`", checkpoints.check_resume, (case["job"], "folder")
    for case in cases_of(checkpoints.test_universal_checkpoints):
        title = f"universal: `{case['job']}` to {', '.join(f'`{other}`' for other in case['others'])}"
        yield title, checkpoints.check_universal, (case["job"], case["others"], "folder")
    for name, test, check in (
        ("Trainer", trainers.test_trainer, trainers.check_trainer),
        ("accelerate", trainers.test_accelerate, trainers.check_accelerate),
    ):
        for case in cases_of(test):
            yield f"{name}: train, evaluate, save, resume; ZeRO {case['stage']}", check, ("folder", case["stage"])


def print_checks(device: torch.device) -> None:
    rank = dist.get_rank()
    if rank == 0:
        print("| | |\n|---|---|")
    for title, check, arguments in checks():
        shared = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(shared, 0)
        arguments = tuple(shared[0] if x == "folder" else x for x in arguments)
        failures: list[Any] = [None] * dist.get_world_size()
        try:
            check(device, *arguments)
            mine = ""
        except AssertionError as error:
            mine = f"wrong: {str(error).splitlines()[0]}"
        dist.all_gather_object(failures, mine)
        if rank == 0:
            print(f"| {title} | {next(filter(None, failures), 'right')} |", flush=True)


def main() -> None:
    warnings.filterwarnings("ignore")
    device = torch.device("cpu")
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank(0))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if sys.argv[1:] == ["checks"]:
        print_checks(device)
        dist.barrier()
        dist.destroy_process_group()
        return
    dtypes = [(dtype, tied) for dtype in ("fp32", "bf16", "fp16") for tied in (False, True)]
    cells, yardsticks = {}, {}
    for job in all_jobs():
        if sys.argv[1:] and job.mode not in sys.argv[1:]:
            continue
        cell, yardstick = measured(job, device)
        cells[job.mode, job.parallel, job.stage, job.dtype, job.tied] = cell
        if job.mode == "zero":
            yardsticks.setdefault((job.dtype, job.tied), yardstick)
        if dist.get_rank() == 0:
            print(job, cell, file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        heads = [f"{dtype}, {'tied' if tied else 'untied'}" for dtype, tied in dtypes]
        print("| mode | ranks of a group | stage |", *(f"{head} |" for head in heads))
        print("|---|---|---|" + "---|" * len(heads))
        for (mode, parallel), rows in itertools.groupby(dict.fromkeys(k[:3] for k in cells), lambda key: key[:2]):
            for *_, stage in rows:
                row = [cells.get((mode, parallel, stage, *column), "") for column in dtypes]
                print(f"| {NAMES[mode]} | {parallel} | {stage} |", *(f"{cell} |" for cell in row))
        if yardsticks:
            print("\n| one process's own error | " + " | ".join(heads) + " |")
            print("|---|" + "---|" * len(heads))
        for name, title in ROWS.items() if yardsticks else ():
            print(f"| {title} | " + " | ".join(f"{yardsticks[column][name]:.1e}" for column in dtypes) + " |")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
