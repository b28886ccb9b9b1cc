"""Time and memory of the loss beside PyTorch's own, against the floor that the same run measures.

    python launch/benchmark.py --tokens 8192 --hidden 4096 --vocab 128256
    torchrun --nproc-per-node 2 launch/benchmark.py --tokens 8192 --hidden 4096 --vocab 128256

The floor is what the library's matrix products take for the operations that a method needs: the three products of
the materialised path back to back (6NVD operations), and 8/6 of it for a method that computes the logits twice.
Each row takes turns with the floor, and its ratio is to the floor's times in those turns: a chip's clock follows its
power, and a row that waits for memory leaves the next one a cooler chip. Peaks are the allocator's, beyond the
inputs, gradients included. Under torchrun each rank holds its slice of the vocabulary, and the floor is divided by
the number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from cce_dist import VocabShard, linear_cross_entropy, reference

# (hidden width, vocabulary) of published heads
MODELS = {
    "llama-3-8b": (4096, 128256),
    "qwen3-8b": (4096, 151936),
    "gemma-2-2b": (2304, 256000),
    "deepseek-v3": (7168, 129280),
}


@dataclass
class Case:
    """One row of the table."""

    name: str
    products: int
    step: Callable[[], torch.Tensor]
    forward: Callable[[], torch.Tensor] | None = None
    # drops the gradients of the last step
    clear: Callable[[], None] = lambda: None
    ranks: int = 1
    seconds: list[float] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)
    # the three products', in turns with this row
    floor_seconds: list[float] = field(default_factory=list)
    peak: int = 0


class Machine:
    """Clocks and memory of the device at hand."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.rank = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cuda", self.rank) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
            self.ballast = torch.randn(10240, 10240, device=self.device, dtype=torch.bfloat16)

    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.cuda else "CPU"

    def seconds(self, function: Callable[[], Any]) -> float:
        if not self.cuda:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        # work ahead in the queue, as in training: the device is timed, not the host's launches, and every row finds
        # the chip as warm, whatever ran before it
        for _ in range(8):
            torch.mm(self.ballast, self.ballast)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def peak(self, function: Callable[[], Any]) -> int:
        """Bytes that the allocator held at most beyond what it held before; 0 on CPUs, where nothing counts them."""
        if not self.cuda:
            function()
            return 0
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def inputs(args: argparse.Namespace, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same on every rank: hidden [N, D], weight [V, D], targets [N]."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, args.dtype)
    # logits of a trained model's size: standard deviation about 2
    scale = 2.0**0.5 * args.hidden**-0.25
    hidden = (torch.randn(args.tokens, args.hidden, device=device, generator=generator) * scale).to(dtype)
    weight = torch.empty(args.vocab, args.hidden, device=device, dtype=dtype)
    for rows in weight.split(16384):
        rows.copy_(torch.randn(rows.shape, device=device, generator=generator) * scale)
    targets = torch.randint(args.vocab, (args.tokens,), device=device, generator=generator)
    targets[torch.rand(args.tokens, device=device, generator=generator) < args.ignored] = -100
    return hidden, weight, targets


def floor_of(hidden: torch.Tensor, weight: torch.Tensor, chunk: int) -> Callable[[], torch.Tensor]:
    """The three products of the materialised path, a chunk of tokens at a time, into memory that is there already."""
    n, vocab = min(chunk, len(hidden)), len(weight)
    logits = torch.empty(n, vocab, dtype=hidden.dtype, device=hidden.device)
    d_hidden, d_weight = torch.empty_like(hidden[:n]), torch.empty_like(weight)
    # random data: a chip runs faster on zeros
    logits.normal_()

    def run() -> torch.Tensor:
        for e in hidden.split(n):
            x = logits[: len(e)]
            torch.mm(e, weight.T, out=x)
            torch.mm(x, weight, out=d_hidden[: len(e)])
            torch.mm(x.T, e, out=d_weight)
        return d_weight

    return run


def training_step(
    loss: Callable[..., torch.Tensor], hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor], Callable[[], None]]:
    """(forward and backward, forward alone, clear). Gradients are made anew each time, as with ``set_to_none``."""
    e, c = hidden.detach().requires_grad_(), weight.detach().requires_grad_()

    def clear() -> None:
        e.grad = c.grad = None

    def step() -> torch.Tensor:
        clear()
        value = loss(e, c, targets)
        value.backward()
        return value

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return loss(e, c, targets)

    return step, forward, clear


def eager(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), targets)


def measure(cases: list[Case], floor: Case, machine: Machine, repeat: int) -> None:
    everything = [floor, *cases]
    for case in everything:
        for _ in range(3):
            case.step()
        case.clear()
        case.peak = machine.peak(case.step)
        case.clear()
    progress = tqdm(total=repeat * len(cases), desc="rounds", disable=machine.rank > 0)
    for case in cases:
        for _ in range(repeat):
            if dist.is_initialized():
                dist.barrier()
            case.floor_seconds.append(machine.seconds(floor.step))
            case.seconds.append(machine.seconds(case.step))
            if case.forward is not None:
                case.forward_seconds.append(machine.seconds(case.forward))
            progress.update()
    progress.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--model", choices=MODELS, help="hidden width and vocabulary of a published head")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--ignored", type=float, default=0.0, help="share of the targets that are ignored")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction, default=True, help="PyTorch's whole logits")
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    if args.model:
        args.hidden, args.vocab = MODELS[args.model]

    machine = Machine()
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group(
            "nccl" if machine.cuda else "gloo", device_id=machine.device if machine.cuda else None
        )
    hidden, weight, targets = inputs(args, machine.device)
    chunk = max(1, min(args.tokens, (1 << 31) // args.vocab))
    floor = Case("library's products", 3, floor_of(hidden, weight, chunk))
    cases = [Case("cce_dist", 4, *training_step(linear_cross_entropy, hidden, weight, targets))]
    if world > 1:
        shard = VocabShard.even(args.vocab, dist.group.WORLD, multiple_of=256)

        def sharded(e: torch.Tensor, c: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return linear_cross_entropy(e, c, t, shard=shard)

        rows = weight[shard.start : shard.stop].clone()
        cases.append(Case(f"cce_dist, {world} ranks", 4, *training_step(sharded, hidden, rows, targets), ranks=world))
    if args.eager and world == 1:
        cases.append(Case("PyTorch", 3, *training_step(eager, hidden, weight, targets)))
    losses = [case.step().item() for case in cases]
    truth = reference.linear_cross_entropy(hidden[:1024], weight, targets[:1024], dtype=torch.float32).item()
    check = linear_cross_entropy(hidden[:1024], weight, targets[:1024]).item()
    measure(cases, floor, machine, args.repeat)
    report(args, machine, world, cases, losses, abs(check - truth) / max(abs(truth), 1e-9))
    if world > 1:
        # gloo's ranks must not leave while another still works
        dist.barrier()
        dist.destroy_process_group()


def report(
    args: argparse.Namespace,
    machine: Machine,
    world: int,
    cases: list[Case],
    losses: list[float],
    error: float,
) -> None:
    if machine.rank > 0:
        return
    three = statistics.median(cases[0].floor_seconds)
    flop = 6 * args.tokens * args.vocab * args.hidden
    print(
        f"{machine.name()} x {world}, torch {torch.__version__}, {args.tokens} x {args.hidden} x {args.vocab}", end=""
    )
    print(f" {args.dtype}, {args.ignored:.0%} ignored; median of {args.repeat}")
    print(f"library's products: {flop / three / 1e12:.0f} TFLOP/s, 6NVD in {three * 1e3:.2f} ms")
    print(f"relative error of the loss of 1024 tokens against fp32 logits: {error:.1e}")
    print(f"{'':24} {'ms':>9} {'to floor':>9} {'forward':>9} {'to floor':>9} {'peak GiB':>9}  loss")
    rows: list[dict[str, Any]] = []
    for case, loss in zip(cases, losses, strict=True):
        both, forward = statistics.median(case.seconds), statistics.median(case.forward_seconds)
        three = statistics.median(case.floor_seconds)
        ratio = both / (three * case.products / 3 / case.ranks)
        forward_ratio = forward / (three / 3 / case.ranks)
        print(f"{case.name:24} {both * 1e3:9.2f} {ratio:9.3f} {forward * 1e3:9.2f} {forward_ratio:9.3f}", end="")
        print(f" {case.peak / 2**30:9.3f}  {loss:.7f}")
        row = {k: v for k, v in asdict(case).items() if k not in ("step", "forward", "clear")}
        rows.append({**row, "ratio": ratio, "forward_ratio": forward_ratio, "loss": loss})
    if world > 1:
        one, many = (statistics.median(case.seconds) for case in cases[:2])
        print(f"{world} ranks take {many / one:.3f} of one")
    if args.json:
        figures: dict[str, Any] = {
            "machine": machine.name(),
            "ranks": world,
            "torch": torch.__version__,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps({**figures, "arguments": vars(args) | {"json": None}, "cases": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
