"""Clocks and memory of the device at hand, and the ranks that work together."""

from __future__ import annotations

import gc
import itertools
import os
import platform
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Machine:
    def __init__(self) -> None:
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
        torch.cuda.synchronize()
        # work ahead in the queue, as in training: the device is timed, not the host's launches, and every row finds
        # the chip as warm, whatever ran before it
        for _ in range(8):
            torch.mm(self.ballast, self.ballast)
        # one chip's ballast ends later than another's
        self.meet()
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return self.largest(begin.elapsed_time(end) / 1e3)

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


def _peak_on_cpu(function: Callable[[], Any]) -> int:
    """What torch's CPU allocator gave out at most: the profiler notes each allocation and each release, inside of
    operators too. Pages that the process got from the system would depend on what ran before."""
    # it announces itself
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    events = record.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate(changes, initial=0))
