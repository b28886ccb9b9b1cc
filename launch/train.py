"""Trains a small Llama on real text, spread over tensor-parallel and data-parallel ranks.

    torchrun --nproc-per-node 2 launch/train.py --preset tiny --tp 2 --steps 40 --compare

Without torchrun it runs on one rank. Each run writes config.json, metrics.jsonl, loss.png and checkpoints/ into
runs/NAME; text that was tokenized once lies in runs/cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import data
import torch
import torch.distributed as dist
from checkpoint import complete_checkpoints, read_state, remove_checkpoint, save_checkpoint, write_state
from data import IGNORED, SMALLEST_VOCABULARY, Batches, cache_folder, text_files
from model import PRESETS, LanguageModel
from report import comparison, plot_loss, read_metrics, replace_text
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from tqdm import tqdm

# what a run must go on with
SETTINGS = ("preset", "vocab_size", "tied", "text")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of a job in any layout."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--preset", default="tiny", choices=PRESETS, help="the model's size: micro and tiny are for CPUs")
    add("--data", nargs="+", type=Path, metavar="PATH", help="text files or folders; else Python's own sources")
    add("--vocab-size", type=int, default=32768)
    add("--tied", action="store_true", help="the embedding shares the head's weight")
    add("--batch", type=int, help="sequences of a micro-batch; else the preset's")
    add("--accumulate", type=int, default=1, help="micro-batches of a step on each data-parallel rank")
    add("--steps", type=int, default=40)
    add("--lr", type=float, help="the largest learning rate; else the preset's")
    add("--warmup", type=int, default=10, help="steps until it is reached; a cosine follows")
    add("--weight-decay", type=float, default=0.1)
    add("--seed", type=int, default=0)
    add("--name", help="of the run; else the preset's")
    add("--runs", type=Path, default=Path(__file__).resolve().parent.parent / "runs", help="the folder of all runs")
    add("--save-every", type=int, default=20, metavar="STEPS", help="a checkpoint; there is one at the end too")
    add("--keep", type=int, default=2, help="how many checkpoints stay")
    add("--resume", action="store_true", help="go on from the run's last complete checkpoint")
    add("--overwrite", action="store_true", help="start anew where the run has checkpoints")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--tp", type=int, default=1, help="ranks that share one model, vocabulary and body")
    add("--fsdp", type=int, default=1, help="data-parallel ranks that share parameters and optimizer states")
    add("--dp", type=int, help="replicas of all that; else as many as there are ranks for")
    add("--head", default="fused", choices=("fused", "materialised"), help="materialised: hold the logits")
    add("--compare", action="store_true", help="then train the same with the logits held, on one rank")
    args = parser.parse_args(argv)
    if args.head == "materialised" and args.tp > 1:
        parser.error(f"argument --head: materialised logits are for --tp 1, got --tp {args.tp}")
    return check_args(args, parser)


def check_args(args: argparse.Namespace, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments with what they leave open. Ends the program where they do not fit."""
    preset = PRESETS[args.preset]
    args.batch = preset.batch if args.batch is None else args.batch
    args.lr = preset.rate if args.lr is None else args.lr
    args.name = args.preset if args.name is None else args.name
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if args.dp is None:
        args.dp = max(1, world // max(1, args.tp * args.fsdp))
    for name in ("tp", "fsdp", "dp", "batch", "accumulate", "steps", "save_every", "keep"):
        if getattr(args, name) < 1:
            parser.error(f"argument --{name.replace('_', '-')}: expected at least 1, got {getattr(args, name)}")
    for name in ("warmup", "seed"):
        if not 0 <= getattr(args, name) < 1 << 32:
            parser.error(f"argument --{name}: expected 0 to 2**32 - 1, got {getattr(args, name)}")
    if args.vocab_size < SMALLEST_VOCABULARY:
        parser.error(f"argument --vocab-size: expected at least {SMALLEST_VOCABULARY}, got {args.vocab_size}")
    if world % args.tp:
        parser.error(f"argument --tp: expected a divisor of the {world} ranks, got {args.tp}")
    if args.tp * args.fsdp * args.dp != world:
        parser.error(
            f"arguments --tp, --fsdp, --dp: expected a product of {world}, the count of ranks, got "
            f"{args.tp} x {args.fsdp} x {args.dp}"
        )
    shared = {"attention heads": preset.heads, "features of the MLP": preset.intermediate}
    for what, count in (shared | {"tokens of a sequence": preset.length}).items():
        if count % args.tp:
            parser.error(f"argument --tp: expected a divisor of {args.preset}'s {count} {what}, got {args.tp}")
    if Path(args.name).name != args.name:
        parser.error(f"argument --name: expected a name without a folder, got {args.name!r}")
    checkpoints = complete_checkpoints(args.runs / args.name / "checkpoints")
    if args.resume and not checkpoints:
        parser.error(f"argument --resume: {args.runs / args.name} has no complete checkpoint to go on from")
    if checkpoints and not args.resume and not args.overwrite:
        parser.error(
            f"{args.runs / args.name} has checkpoints: pass --resume to go on, --overwrite to start anew, or --name"
        )
    try:
        text_files(args.data)
    except ValueError as error:
        parser.error(str(error))
    return args


def start_ranks() -> torch.device:
    """Joins the ranks, one where torchrun did not start this process, and returns this rank's device."""
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    options: dict[str, Any] = {"timeout": timedelta(minutes=30)}
    if "RANK" not in os.environ:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if not torch.cuda.is_available():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_size))
        dist.init_process_group("gloo", **options)
        return torch.device("cpu")
    if local_size > torch.cuda.device_count():
        raise ValueError(f"expected at most one rank a GPU: {local_size} ranks, {torch.cuda.device_count()} GPUs")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **options)
    return device


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Of step 0, 1, ...: linear up to ``--lr``, then a cosine down to a tenth of it."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def peak_memory(device: torch.device) -> int:
    """Bytes: of this GPU's tensors, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage would count the memory of the process that started this one too
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def load_tokens(args: argparse.Namespace) -> tuple[str, torch.Tensor]:
    """(the name of the text in the cache, its ids). Rank 0 makes them while the others wait."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        files = text_files(args.data)
        folder = cache_folder(files, args.vocab_size, args.runs / "cache")
        if not (folder / "tokens.pt").exists():
            command = [sys.executable, data.__file__, str(args.vocab_size), str(folder)]
            subprocess.run(command, input="\0".join(map(str, files)), text=True, check=True)
        told = [folder.name]
    dist.broadcast_object_list(told, src=0)
    return told[0], torch.load(args.runs / "cache" / told[0] / "tokens.pt", mmap=True, weights_only=True)


def check_config(old: dict[str, Any], new: dict[str, Any], names: Sequence[str] = SETTINGS) -> None:
    """``ValueError`` where a run can not go on with these settings."""
    for name in names:
        if old.get(name) != new[name]:
            raise ValueError(f"--resume: the run was started with {name} {old.get(name)!r}, got {new[name]!r}")


class Trainer:
    """Model, optimizer and data of a run, laid out over the ranks."""

    settings = SETTINGS

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.rank = args, device, dist.get_rank()
        # neighbouring ranks, which are nearest to each other, share a model
        mesh = init_device_mesh(device.type, (args.dp, args.fsdp, args.tp), mesh_dim_names=("dp", "fsdp", "tp"))
        self.data_groups = mesh.get_group("dp"), mesh.get_group("fsdp")
        self.data_ranks = args.dp * args.fsdp
        self.data_rank = self.rank // args.tp
        self.text, tokens = load_tokens(args)
        self.data = Batches(tokens, PRESETS[args.preset].length, args.batch, args.seed)
        self.model = LanguageModel(args, mesh)
        # one group of parameters for each mesh: an optimizer's step can not mix them
        by_mesh: dict[Any, list[torch.nn.Parameter]] = {}
        for parameter in self.model.parameters():
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": parameters} for parameters in by_mesh.values()],
            betas=(0.9, 0.95),
            weight_decay=args.weight_decay,
        )

    def sum_over_data(self, value: torch.Tensor) -> torch.Tensor:
        for group in self.data_groups:
            dist.all_reduce(value, group=group)
        return value

    def step(self, step: int) -> tuple[float, int]:
        """Trains on the text of step 0, 1, ... and returns its mean loss and its count of tokens."""
        args, ranks = self.args, self.data_ranks
        first = step * args.accumulate * ranks + self.data_rank
        batches = [self.data(first + micro * ranks) for micro in range(args.accumulate)]
        count = sum((labels != IGNORED).sum(dtype=torch.float64) for _, labels in batches).to(self.device)
        # each token's loss is divided by the count of the whole step. FSDP then averages the gradients over the
        # data-parallel ranks where they should add up, so their number takes that division back
        denominator = self.sum_over_data(count) / ranks
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro, (ids, labels) in enumerate(batches):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(micro == args.accumulate - 1)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                part = self.model(ids.to(self.device), labels.to(self.device), denominator)
            part.backward()
            loss += part.detach()
        for parameter in self.model.parameters():
            # a norm has seen this rank's part of the sequence only
            if isinstance(parameter, DTensor):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.sum_over_data(loss).item() / ranks, int(count.item())

    def save(self, folder: Path) -> None:
        """Called on every rank."""
        write_state(folder, self.model, self.optimizer)

    def load(self, folder: Path) -> None:
        read_state(folder, self.model, self.optimizer)


def train(
    args: argparse.Namespace,
    device: torch.device,
    make_trainer: Callable[[argparse.Namespace, torch.device], Any] = Trainer,
) -> None:
    run = args.runs / args.name
    metrics, checkpoints = run / "metrics.jsonl", run / "checkpoints"
    trainer, start = make_trainer(args, device), 0
    config = {name: value for name, value in vars(args).items() if name not in ("resume", "overwrite", "compare")}
    # as what is read back
    config = json.loads(json.dumps(config, default=str))
    config |= {"text": trainer.text, "device": device.type, "torch": torch.__version__}
    if args.resume:
        check_config(json.loads((run / "config.json").read_text()), config, trainer.settings)
        start, path = complete_checkpoints(checkpoints)[-1]
        trainer.load(path)
    # no rank may still look for checkpoints when the first one removes some
    dist.barrier()
    if trainer.rank == 0:
        checkpoints.mkdir(parents=True, exist_ok=True)
        for _, path in [] if args.resume else complete_checkpoints(checkpoints):
            remove_checkpoint(path)
        # one line a step: those past the checkpoint are trained again
        lines = metrics.read_text().splitlines(keepends=True)[:start] if start else []
        replace_text(metrics, "".join(lines))
        replace_text(run / "config.json", json.dumps(config, indent=2) + "\n")
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(metrics.open("a")) if trainer.rank == 0 else None
        bar = tqdm(total=args.steps, initial=start, desc=args.name, unit="step", disable=log is None)
        stack.enter_context(bar)
        for step in range(start, args.steps):
            began = time.perf_counter()
            loss, tokens = trainer.step(step)
            seconds = time.perf_counter() - began
            if log is not None:
                record = {"step": step + 1, "loss": loss, "tokens": tokens, "seconds": seconds}
                record |= {"tokens_per_second": tokens / seconds, "peak_memory": peak_memory(device)}
                print(json.dumps(record), file=log, flush=True)
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            bar.update()
            if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
                save_checkpoint(checkpoints, step + 1, trainer.save, args.keep)
    if trainer.rank == 0:
        plot_loss(run / "loss.png", {args.name: read_metrics(run)})


def compare(args: argparse.Namespace) -> None:
    """Trains the same job with materialised logits on one rank, in a process of its own, and prints both."""
    run = args.runs / args.name
    other = args.runs / f"{args.name}-materialised"
    same = [argument for argument in sys.argv[1:] if argument not in ("--compare", "--resume", "--overwrite")]
    # what torchrun set would make the new process wait for other ranks, and run on fewer threads
    launcher = ("GROUP_", "LOCAL_", "MASTER_", "OMP_", "RANK", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    command = [sys.executable, __file__, *same, "--head", "materialised", "--name", other.name]
    command += ["--tp", "1", "--fsdp", "1", "--dp", "1"]
    command += ["--accumulate", str(args.accumulate * args.dp * args.fsdp), "--overwrite"]
    subprocess.run(command, env=environment, check=True)

    layout = ", ".join(f"{name} {getattr(args, name)}" for name in ("tp", "fsdp", "dp"))
    runs = {f"fused, {layout}": read_metrics(run), "materialised, one rank": read_metrics(other)}
    plot_loss(run / "loss.png", runs)
    print(f"\n{comparison(runs)}\nplot: {run / 'loss.png'}")


def main() -> None:
    args = parse_args()
    device = start_ranks()
    rank = dist.get_rank()
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()
    if args.compare and rank == 0:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        compare(args)


if __name__ == "__main__":
    main()
