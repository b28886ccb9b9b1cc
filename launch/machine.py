"""Clocks and memory of the device at hand, and the ranks that work together."""

from __future__ import annotations

import gc
import itertools
import math
import os
import platform
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# a kernel's name, and when it began and ended
Kernel = tuple[str, float, float]
# how the names of kernels begin that communicate
COMMUNICATION = "nccl"


class Machine:
    def __init__(self) -> None:
        # torch's profiler announces itself
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")
        self.cuda = torch.cuda.is_available()
        self.rank, self.ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
            self.ballast = torch.randn(10240, 10240, device=self.device, dtype=torch.bfloat16)
        if self.ranks > 1:
            backend, device = ("nccl", self.device) if self.cuda else ("gloo", None)
            # not too long a wait for a rank that failed alone
            dist.init_process_group(backend, device_id=device, timeout=timedelta(minutes=3))
        self.together = torch.zeros(1, device=self.device)

    def name(self) -> str:
        if self.cuda:
            return torch.cuda.get_device_name(self.device)
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"

    def meet(self) -> None:
        """Work queued behind this starts when every rank has come so far."""
        if self.ranks > 1:
            dist.all_reduce(self.together)

    def largest(self, value: float) -> float:
        if self.ranks == 1:
            return value
        values = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values.item()

    def seconds(self, function: Callable[[], Any]) -> float:
        """Of the slowest rank."""
        if not self.cuda:
            self.meet()
            start = time.perf_counter()
            function()
            return self.largest(time.perf_counter() - start)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.queue_ahead(8)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return self.largest(begin.elapsed_time(end) / 1e3)

    def queue_ahead(self, products: int) -> None:
        torch.cuda.synchronize()
        # work ahead in the queue, as in training: the device is timed, not the host's launches, and every row finds
        # the chip as warm, whatever ran before it
        for _ in range(products):
            torch.mm(self.ballast, self.ballast)
        # one chip's ballast ends later than another's
        self.meet()

    def exposed(self, function: Callable[[], Any], trace: Path | None) -> float:
        """The share of the function's time in which a GPU communicates and computes nothing, or waits for another
        GPU to do so, of the rank where it is largest. Each rank writes a Chrome trace into the folder ``trace``."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
            # a host that is traced launches more slowly
            self.queue_ahead(16)
            function()
            torch.cuda.synchronize()
        if trace is not None:
            trace.mkdir(parents=True, exist_ok=True)
            record.export_chrome_trace(str(trace / f"rank{self.rank}.json"))
        kernels = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in record.events()
            # ranges that the host names have the device's type too
            if event.device_type.name == "CUDA" and not event.is_user_annotation
        ]
        # the first to communicate is the ranks' meeting
        met = min((end for name, _, end in kernels if name.startswith(COMMUNICATION)), default=math.inf)
        return self.largest(exposed_share(kernel for kernel in kernels if kernel[1] >= met))

    def peak(self, function: Callable[[], Any]) -> int:
        """Bytes that the allocator held at most beyond what it held before, on the rank that held most."""
        if not self.cuda:
            return int(self.largest(_peak_on_cpu(function)))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return int(self.largest(torch.cuda.max_memory_allocated() - before))

    def leave(self) -> None:
        if self.ranks > 1:
            # gloo's ranks must not leave while another still works
            dist.barrier()
            dist.destroy_process_group()

    def forget(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


def exposed_share(kernels: Iterable[Kernel]) -> float:
    """The time in which kernels that communicate run and no others do, to that from the first kernel to the last; NaN
    where no kernel was seen."""
    kernels = list(kernels)
    if not kernels:
        return math.nan
    others = [kernel for kernel in kernels if not kernel[0].startswith(COMMUNICATION)]
    whole = max(end for _, _, end in kernels) - min(begin for _, begin, _ in kernels)
    return (_busy(kernels) - _busy(others)) / whole


def _busy(kernels: Iterable[Kernel]) -> float:
    """The time in which any of them runs."""
    total, reached = 0.0, -math.inf
    for _, begin, end in sorted(kernels, key=lambda kernel: kernel[1]):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _peak_on_cpu(function: Callable[[], Any]) -> int:
    """What torch's CPU allocator gave out at most: the profiler notes each allocation and each release, inside of
    operators too. Pages that the process got from the system would depend on what ran before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    events = record.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate(changes, initial=0))
