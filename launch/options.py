"""What each option of the loss costs: time beside the plain call, forward and backward.

    python launch/options.py --shape 8192x4096x128256 --methods recompute fused
    torchrun --nproc-per-node 2 launch/options.py

A chip's clock wanders, so every row takes turns with the plain call of its method, and its ratio is the median of
the turns'. The last rows are log-probabilities of each token, and entropies with them, beside the plain
``recompute``, and other implementations that have such an operation. A row that fails says why, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmark import Shape, Tensors, inputs
from machine import Machine
from tqdm import tqdm

from cce_dist import VocabShard, linear_cross_entropy, linear_log_probs

Step = Callable[[], None]
METHODS = ("default", "recompute", "cached", "fused")


def option_sets(tensors: Tensors, rows: slice) -> dict[str, dict[str, Any]]:
    """Each option alone, and nearly all of them; ``rows`` are this rank's classes."""
    hidden, weight, targets = tensors
    vocab, device = len(weight), hidden.device
    generator = torch.Generator(device).manual_seed(1)
    bias = torch.randn(vocab, device=device, generator=generator).to(hidden.dtype)[rows].clone().requires_grad_()
    classes = torch.rand(vocab, device=device, generator=generator) + 0.5
    tokens = torch.rand(len(targets), device=device, generator=generator) + 0.5
    found: dict[str, dict[str, Any]] = {
        "bias": {"bias": bias},
        "logit_scale": {"logit_scale": 0.9},
        "logit_scale, trained": {"logit_scale": torch.tensor(0.9, device=device, requires_grad=True)},
        "softcap": {"softcap": 30.0},
        "label_smoothing": {"label_smoothing": 0.1},
        "z_loss": {"z_loss": 1e-4},
        "class_weight": {"class_weight": classes},
        "class_weight, smoothed": {"class_weight": classes, "label_smoothing": 0.1},
        "token_weight": {"token_weight": tokens},
        "return_stats": {"return_stats": True},
    }
    together = ("bias", "logit_scale", "softcap", "z_loss", "class_weight", "token_weight", "return_stats")
    found["these but smoothing"] = {name: value for key in together for name, value in found[key].items()}
    return found


class Steps:
    """Forward and backward of a shape's operands, gradients made anew each time."""

    def __init__(self, shape: Shape, args: argparse.Namespace, machine: Machine) -> None:
        self.whole = inputs(shape, args, machine.device)
        self.shard = None if machine.ranks == 1 else VocabShard.even(shape[2], dist.group.WORLD, multiple_of=256)
        self.rows = slice(None) if self.shard is None else slice(self.shard.start, self.shard.stop)
        hidden, weight, self.targets = self.whole
        self.e, self.c = hidden.requires_grad_(), weight[self.rows].clone().requires_grad_()
        self.weights = torch.rand(len(hidden), device=machine.device) / len(hidden)

    def __call__(self, outputs: Callable[..., Any], **options: Any) -> Step:
        """``outputs(hidden, weight, targets)``, one number or one for each token, or a tuple that begins with it."""
        leaves = [self.e, self.c, *(x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad)]

        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            found = outputs(self.e, self.c, self.targets, **options)
            found = [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, torch.Tensor)]
            torch.autograd.backward(found, [torch.ones_like(x) if x.dim() == 0 else self.weights for x in found])

        return step


def per_token(steps: Steps) -> dict[str, Callable[[], Step]]:
    """Log-probabilities, ours and others'."""
    shard = steps.shard

    def verl() -> Step:
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy as theirs

        group = None if shard is None else shard.group
        return steps(lambda e, c, t: theirs(e, c, t, 1.0, "none", group))

    def liger() -> Step:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        if shard is not None:
            raise ValueError("takes the whole vocabulary")

        def losses(e: torch.Tensor, c: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return LigerFusedLinearCrossEntropyFunction.apply(e, c, t, None, None, -100, 0.0, 0.0, "none")[0]

        return steps(losses)

    return {
        "log-probabilities": lambda: steps(linear_log_probs, shard=shard),
        "and entropies": lambda: steps(linear_log_probs, shard=shard, return_entropy=True),
        "verl's, with entropies": verl,
        "liger's losses": liger,
    }


def loss_of(*operands: torch.Tensor, **options: Any) -> torch.Tensor:
    """Without the statistics, which have no gradient."""
    found = linear_cross_entropy(*operands, **options)
    return found[0] if isinstance(found, tuple) else found


def measured(plain: Step, make: Callable[[], Step], args: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    try:
        step = make()
        for _ in range(3 if machine.cuda else 1):
            plain(), step()
        turns = [(machine.seconds(plain), machine.seconds(step)) for _ in range(args.repeat)]
    # whatever another library may raise is that row's result
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {
        "milliseconds": 1e3 * statistics.median(took for _, took in turns),
        "ratio": statistics.median(took / base for base, took in turns),
    }


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", default="8192x4096x128256" if cuda else "512x128x8192", help="tokens x hidden width x classes")
    add("--methods", choices=METHODS, nargs="+", default=["default", "recompute", "fused"])
    add("--budget", type=int, metavar="MIB", help="memory_budget of all rows")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16" if cuda else "float32")
    add("--ignored", type=float, default=0.0, help="share of the targets that are ignored")
    add("--repeat", type=int, default=9 if cuda else 5)
    add("--json", type=Path, help="file for all figures")
    args = parser.parse_args(arguments)
    tokens, width, vocab = map(int, args.shape.split("x"))
    machine = Machine()
    steps = Steps((tokens, width, vocab), args, machine)
    budget = {} if args.budget is None else {"memory_budget": args.budget << 20}

    def ours(method: str, **options: Any) -> Step:
        chosen = {} if method == "default" else {"method": method}
        return steps(loss_of, shard=steps.shard, **chosen, **budget, **options)

    rows: list[tuple[str, str, Callable[[], Step]]] = []
    for method in args.methods:
        for name, options in option_sets(steps.whole, steps.rows).items():
            rows.append((method, name, lambda method=method, options=options: ours(method, **options)))
    rows += [("recompute", name, make) for name, make in per_token(steps).items()]
    found = []
    bar = tqdm(rows, disable=machine.rank > 0)
    if machine.rank == 0:
        bar.write(f"{args.shape}, {args.dtype}, {machine.name()}, {machine.ranks} ranks; ratio to the plain call")
    for method, name, make in bar:
        row = {"method": method, "row": name, **measured(ours(method), make, args, machine)}
        found.append(row)
        told = row.get("failure") or f"{row['milliseconds']:8.2f} ms {row['ratio']:7.3f}"
        if machine.rank == 0:
            bar.write(f"{method:10} {name:24} {told}")
    if args.json and machine.rank == 0:
        figures = {"machine": machine.name(), "ranks": machine.ranks, "torch": torch.__version__, "shape": args.shape}
        args.json.write_text(json.dumps({**figures, "rows": found}, indent=1))
    machine.leave()
    return found


if __name__ == "__main__":
    main()
