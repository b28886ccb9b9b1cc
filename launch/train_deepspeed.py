"""Trains what launch/train.py trains on DeepSpeed's engine: ZeRO or AutoTP, as a DeepSpeed config says.

    deepspeed --num_gpus 2 launch/train_deepspeed.py --config launch/ds_zero3.json --preset tiny --steps 40
    torchrun --nproc-per-node 2 launch/train_deepspeed.py --config launch/ds_autotp.json --preset tiny --steps 40

The script sets the config's batch sizes, and bf16 where that is "auto": on GPUs. Each run writes config.json,
metrics.jsonl, loss.png and checkpoints/ into runs/NAME, and goes on from there with --resume in the same layout.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data import IGNORED, Batches
from model import PRESETS, whole_model
from train import SETTINGS, check_args, learning_rate, load_tokens, make_parser, start_ranks, train

from cce_dist.integrations.deepspeed import prepare

HERE = Path(__file__).resolve().parent


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--config", type=Path, default=HERE / "ds_zero3.json", help="a DeepSpeed config, as launch/ds_*.json")
    add("--local_rank", type=int, help="what the deepspeed launcher passes")
    args = parser.parse_args(argv)
    # the launcher's, and of each rank another
    del args.local_rank
    if not args.config.is_file():
        parser.error(f"argument --config: {args.config} does not exist; expected a DeepSpeed config, a JSON file")
    try:
        args.deepspeed = json.loads(args.config.read_text())
        args.tp = int(args.deepspeed.get("tensor_parallel", {}).get("autotp_size", 1))
    except (AttributeError, TypeError, ValueError) as error:
        parser.error(f"argument --config: {args.config} is no DeepSpeed config: {error}")
    # all ranks beside those that share a model are ZeRO's
    args.fsdp, args.dp = 1, None
    return check_args(args, parser)


class EngineTrainer:
    """Engine and data of a run."""

    # DeepSpeed's own checkpoints are of one layout
    settings = (*SETTINGS, "tp", "dp", "deepspeed")

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        os.environ.setdefault("LOCAL_RANK", "0")
        import deepspeed

        if device.type == "cpu":
            # an op that only inference uses, and whose build takes a compiler and a minute
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.args, self.device, self.rank = args, device, dist.get_rank()
        self.data_ranks, self.data_rank = args.dp, self.rank // args.tp
        self.text, tokens = load_tokens(args)
        self.data = Batches(tokens, PRESETS[args.preset].length, args.batch, args.seed)
        model = whole_model(args).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=args.weight_decay)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=self._config())
        path = prepare(self.engine, ignore_index=IGNORED)
        self.engine.train()
        if self.rank == 0:
            print(path, flush=True)

    def _config(self) -> dict[str, Any]:
        config = json.loads(json.dumps(self.args.deepspeed))
        config["train_micro_batch_size_per_gpu"] = self.args.batch
        config["gradient_accumulation_steps"] = self.args.accumulate
        config.setdefault("steps_per_print", 1 << 30)
        if config.get("bf16", {}).get("enabled") == "auto":
            config["bf16"]["enabled"] = self.device.type == "cuda"
        return config

    def sum_over_data(self, value: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(value)
        # the ranks that share a model had the same
        return value / self.args.tp

    def step(self, step: int) -> tuple[float, int]:
        """Trains on the text of step 0, 1, ... and returns its mean loss and its count of tokens."""
        args, ranks = self.args, self.data_ranks
        first = step * args.accumulate * ranks + self.data_rank
        batches = [self.data(first + micro * ranks) for micro in range(args.accumulate)]
        count = sum((labels != IGNORED).sum(dtype=torch.float64) for _, labels in batches).to(self.device)
        count = self.sum_over_data(count)
        # the engine averages over data-parallel ranks and micro-batches, where the tokens' losses should add up
        denominator = count / (ranks * args.accumulate)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for ids, labels in batches:
            # the labels are shifted
            inputs = {"input_ids": ids.to(self.device), "shift_labels": labels.to(self.device)}
            part = self.engine(**inputs, num_items_in_batch=denominator).loss
            self.engine.backward(part)
            self.engine.step()
            loss += part.detach()
        return self.sum_over_data(loss).item() / (ranks * args.accumulate), int(count.item())

    def save(self, folder: Path) -> None:
        """Called on every rank."""
        self.engine.save_checkpoint(str(folder), tag="engine")

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder), tag="engine")


def main() -> None:
    args = parse_args()
    device = start_ranks()
    try:
        train(args, device, EngineTrainer)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
