"""Prints the tables of docs/deepspeed.md: every mode at every stage, in every dtype, untied and tied.

    PYTHONPATH=tests torchrun --nproc-per-node 4 tests/deepspeed_tables.py [MODE ...]

A cell is the largest of three errors (of the head's gradient, of all gradients, of the weights after three steps),
each in units of the error that one process of the same dtype makes, or, under AutoTP, the same job with DeepSpeed's
own loss, if that is larger; all against one process in fp64. A star: DeepSpeed takes a wrong norm there.
"""

from __future__ import annotations

import itertools
import sys
import warnings

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


def main() -> None:
    warnings.filterwarnings("ignore")
    device = torch.device("cpu")
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank(0))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
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
