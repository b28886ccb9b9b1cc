"""``python -m cce_dist plan``: how a call would be computed, and what else there is. ``python -m cce_dist check``:
whether the machine at hand computes it right."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from . import __version__, linear_cross_entropy, reference
from .kernels import runtime
from .kernels.runtime import has_tma, multiprocessors, target_of, triton_serves
from .planner import DTYPES, METHODS, REDUCTIONS, Plan, chip_of, default_budget, plan, plan_request

MIB = 1 << 20
# a budget that bounds nothing
UNLIMITED = 1 << 62


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cce_dist", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    text = "print the methods and budgets that there are for a call, and mark the one that it would use"
    planning = commands.add_parser("plan", help=text, description=text)
    add = planning.add_argument
    add("--tokens", type=int, required=True, help="all of a call's tokens, ignored ones included")
    add("--hidden", type=int, required=True, help="width of the hidden states")
    add("--vocab", type=int, required=True, help="classes of the whole vocabulary")
    add("--tp", type=int, default=1, help="ranks that share the vocabulary (1)")
    add("--dtype", choices=[str(dtype)[6:] for dtype in DTYPES], default="bfloat16")
    add("--budget", type=_budget, metavar="MIB|min", help="memory_budget in MiB, or min; left out: the default")
    add("--reduction", choices=REDUCTIONS, default="mean")
    add("--sequence-parallel", action="store_true", help="each rank holds a slice of the hidden states")
    add("--main-grad", action="store_true", help="the weight carries an fp32 gradient of its own")
    add("--device", help="cpu, cuda, or a chip's name such as sm_90; left out: the GPU at hand, else sm_90")
    text = (
        "say what this machine has and what computes on it, and compare the loss and its gradients with fp64, in "
        "under a minute; the exit status is 1 where one is off"
    )
    commands.add_parser("check", help=text, description=text)
    args = parser.parse_args(arguments)
    if args.command == "check":
        return check()
    try:
        print(plan_table(args))
    except ValueError as error:
        planning.error(str(error))
    return 0


def _budget(text: str) -> int | str:
    try:
        return text if text == "min" else int(float(text) * MIB)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"expected MiB or min, got {text!r}") from None


def plan_table(args: argparse.Namespace) -> str:
    dtype = getattr(torch, args.dtype)

    def planned(memory_budget: int | str | None, method: str | None = None) -> Plan:
        return plan(
            args.tokens, args.hidden, args.vocab, dtype=dtype, tp=args.tp, reduction=args.reduction,
            memory_budget=memory_budget, method=method, device=args.device, main_grad=args.main_grad,
            sequence_parallel=args.sequence_parallel,
        )  # fmt: skip

    chosen = planned(args.budget)
    problem, *_ = plan_request(
        args.tokens, args.hidden, args.vocab, dtype, ranks=args.tp, device=args.device, reduction=args.reduction,
        memory_budget=None, method=None, hidden_grad=True, weight_grad=True,
    )  # fmt: skip
    default = default_budget(problem)
    limit = args.budget if isinstance(args.budget, int) else default
    # of some budgets, each plan once
    found = {chosen, planned("min"), planned(UNLIMITED)}
    for method in METHODS:
        for budget in ("min", limit, *((2 * limit, 4 * limit) if method == "fused" else ()), UNLIMITED):
            # there is no such method for these inputs, or it takes more
            with suppress(ValueError):
                found.add(planned(budget, method))

    ranks = f" over {args.tp} ranks" if args.tp > 1 else ""
    budget = "min" if args.budget == "min" else f"{limit / MIB:,.0f} MiB{' (default)' if args.budget is None else ''}"
    lines = [
        f"{args.tokens:,} tokens x {args.hidden:,} x {args.vocab:,} classes{ranks}, {args.dtype}, {args.reduction}",
        f"{chip_of(args.device)[0]}, {problem.device} multiprocessors; budget {budget}",
        "",
        f"{'method':10} {'':32} {'products':>8} {'time':>6} {'workspace':>10} {'held':>9} {'peak':>9}",
    ]
    for p in sorted(found, key=lambda p: (p.workspace, p.cost)):
        sizes = f"{p.workspace / MIB:10,.0f} {p.held / MIB:9,.0f} {p.peak / MIB:9,.0f}"
        lines.append(
            f"{p.method:10} {_setting(p, problem.vocab):32} {p.products:8.2f} {p.cost / 3:6.2f} {sizes}"
            f"{'  <- chosen' if p == chosen else ''}"
        )
    lines += [
        "",
        "time: to that of three products. workspace, held from forward to backward, peak (with the gradients): MiB a",
        "rank, beyond the inputs",
    ]
    return "\n".join(lines)


def _setting(p: Plan, vocab: int) -> str:
    if p.method == "fused":
        return f"{p.chunk:,} tokens at a time"
    if p.method == "cached":
        return f"{min(p.kept, vocab):,} of {vocab:,} columns kept"
    return f"{p.panel:,} columns at a time"


class Case(NamedTuple):
    shape: tuple[int, int, int]
    dtype: torch.dtype
    method: str
    budget: int | str | None


# tokens, width, classes, budget: rows that no copy engine takes; more than a chunk, and columns that are not kept
_SHAPES = (((37, 33, 301), None), ((1100, 64, 1500), "min"))
# relative: a loss in fp32, and the factor above the error of whole fp32 logits whose gradients are rounded once. of
# fp32 gradients little is left but the order of sums
_LOSS, _FACTOR, _FACTOR_FP32, _FLOOR_FP32 = 1e-5, 1.08, 2.0, 2.0**-22


def check() -> int:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    triton = f"Triton {runtime.triton.__version__}" if runtime.HAS_TRITON else "no Triton"
    versions = f"torch {torch.__version__}, {triton}, {_nccl()}, Python {platform.python_version()}"
    print(f"cce_dist {__version__}, {versions}")
    print(f"{device}: {_machine(device)}")
    print(f"path: {_path(device)}")
    started = time.perf_counter()
    print("\nerrors relative to fp64, and in brackets to those of whole fp32 logits")
    print(f"{'shape':16} {'dtype':9} {'method':10} {'loss':>8} {'d hidden':>15} {'d weight':>15}")
    failures = 0
    shapes, dtypes = list(_SHAPES), [torch.float32, torch.float16, torch.bfloat16]
    if runtime.INTERPRETED:
        # it would take minutes for the larger shape, and gets products of transposed bf16 tiles wrong
        del shapes[1:], dtypes[2]
    for index, (shape, budget) in enumerate(shapes):
        # compiling takes most of the time, and fp32 has the same kernels for every shape
        for dtype in dtypes[index > 0 :]:
            for method in METHODS if dtype != torch.float16 else METHODS[:1]:
                case = Case(shape, dtype, method, budget)
                title = f"{' x '.join(map(str, shape)):16} {str(dtype)[6:]:9} {method:10}"
                # whatever goes wrong is this row's result, and the others are tried
                try:
                    cells, passed = _try(case, device)
                except Exception as error:
                    cells, passed = f"{type(error).__name__}: {error}", False
                failures += not passed
                print(f"{title} {cells}  {'ok' if passed else 'FAILED'}", flush=True)
    print(f"\n{f'{failures} failed' if failures else 'all good'}, in {time.perf_counter() - started:.0f} s")
    return 1 if failures else 0


def _nccl() -> str:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return "no NCCL"
    return "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))


def _machine(device: torch.device) -> str:
    if device.type != "cuda":
        return platform.processor() or platform.machine()
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return (
        f"{torch.cuda.get_device_name(device)}, {target_of(device)}, {multiprocessors(device)} multiprocessors, "
        f"{memory:.0f} GiB, one of {torch.cuda.device_count()} here"
    )


def _path(device: torch.device) -> str:
    """What computes on the device, and why."""
    if triton_serves(torch.empty(0, device=device)):
        if runtime.INTERPRETED:
            return "the Triton kernels, interpreted, since TRITON_INTERPRET is set"
        fetch = "its copy engine (TMA) fetches" if has_tma(target_of(device)) else "its threads fetch"
        return f"the Triton kernels, since there are Triton and {target_of(device)}; {fetch} 16-bit tiles"
    if device.type == "cuda" and runtime.HAS_TRITON:
        why = f"{target_of(device)} is older than sm_80"
    elif device.type == "cuda":
        why = "there is no Triton from 3.5 on"
    elif torch.version.cuda or torch.version.hip:
        why = "torch sees no GPU"
    else:
        why = "this torch is built for CPUs"
    return f"plain PyTorch, since {why}; the Triton kernels need Triton and a GPU, of NVIDIA's one from sm_80 on"


def _try(case: Case, device: torch.device) -> tuple[str, bool]:
    """The errors as text, and whether they are what they may be."""
    n, d, v = case.shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=generator).to(device, case.dtype)
    weight = (torch.randn(v, d, generator=generator) * d**-0.5).to(device, case.dtype)
    targets = torch.randint(v, (n,), generator=generator).to(device)
    targets[::5] = -100

    def results(function: Any, held: torch.dtype, **options: Any) -> list[torch.Tensor]:
        e, c = (x.to(held, copy=True).requires_grad_() for x in (hidden, weight))
        loss = function(e, c, targets, **options)
        # an upstream gradient that is not 1
        return [loss.detach(), *torch.autograd.grad(3 * loss, (e, c))]

    ours = results(linear_cross_entropy, case.dtype, method=case.method, memory_budget=case.budget)
    truth = results(reference.linear_cross_entropy, torch.float64)
    whole = results(reference.linear_cross_entropy, torch.float32, dtype=torch.float32)
    off = [_relative(x, true) for x, true in zip(ours, truth, strict=True)]
    yard = [_relative(x.to(case.dtype), true) for x, true in zip(whole, truth, strict=True)]
    if case.dtype == torch.float32:
        allowed = [_FACTOR_FP32 * y + _FLOOR_FP32 for y in yard]
    else:
        allowed = [_FACTOR * y for y in yard]
    cells = f"{off[0]:8.1e} " + " ".join(f"{o:8.1e} ({o / y:4.2f})" for o, y in zip(off[1:], yard[1:], strict=True))
    # a NaN is not below its bound
    return cells, all(o <= a for o, a in zip(off, [_LOSS, *allowed[1:]], strict=True))


def _relative(x: torch.Tensor, true: torch.Tensor) -> float:
    return ((x.double() - true).norm() / true.norm()).item()


if __name__ == "__main__":
    sys.exit(main())
