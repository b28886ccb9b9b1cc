"""Ranks to run checks on: processes that live as long as the session, or the ranks of the torchrun job we are in.

A check is a function of a module, ``check(group, device, *args)``, that runs on each rank of a group. It asserts, and
returns nothing.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from poison import poisoned_memory

Check = Callable[..., None]
# of a collective: a rank that waits longer waits for one that never comes
COLLECTIVE_TIMEOUT = timedelta(seconds=90)
# how long the others may take to end after one rank has failed
GRACE = 3.0
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


class RankError(AssertionError):
    """What went wrong on the ranks, with their tracebacks."""


def _make_groups() -> None:
    """The groups that checks run on: made by all ranks in the same order, before anything can go wrong."""
    size = dist.get_world_size()
    sizes = {*range(1, min(size, 4) + 1), size}
    for members in [
        *(tuple(range(count)) for count in sorted(sizes)),
        *([(0, 2), (1, 3), (2, 3)] if size >= 4 else []),
    ]:
        _groups[members] = dist.new_group(list(members), timeout=COLLECTIVE_TIMEOUT)


def subgroup(*memberships: tuple[int, ...]) -> dist.ProcessGroup:
    """The group among ``memberships`` (ranks of the world) that this rank belongs to."""
    (mine,) = (ranks for ranks in memberships if dist.get_rank() in ranks)
    return _groups[mine]


def _run_check(check: Check, args: tuple[Any, ...], ranks: int, device: torch.device) -> str | None:
    """The traceback of what the check raised on this rank."""
    if dist.get_rank() >= ranks:
        return None
    try:
        group = subgroup(tuple(range(ranks)))
        with poisoned_memory():
            check(group, device, *args)
    except Exception:
        return traceback.format_exc()
    return None


def _raise_failures(failures: dict[int, str | None], silent: str = "") -> None:
    told = [f"rank {rank}:\n{failure}" for rank, failure in sorted(failures.items()) if failure is not None]
    if told or silent:
        raise RankError("\n".join([*told, silent] if silent else told))


class JobRanks:
    """The ranks of the torchrun job that runs this very test session."""

    def __init__(self) -> None:
        local = int(os.environ["LOCAL_RANK"])
        self.device, backend = torch.device("cpu"), "gloo"
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            self.device = torch.device("cuda", local % count)
            torch.cuda.set_device(self.device)
            # both backends: what the ranks tell each other about failures must not depend on the device. NCCL takes
            # one rank a GPU; more of them share one through gloo
            shared = int(os.environ["LOCAL_WORLD_SIZE"]) > count
            backend = f"cpu:gloo,cuda:{'gloo' if shared else 'nccl'}"
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        _make_groups()
        self.control = dist.new_group(backend="gloo", timeout=3 * COLLECTIVE_TIMEOUT)

    def run(self, check: Check, *args: Any, ranks: int, interpret: bool = False, timeout: float = 0) -> None:
        from cce_dist.kernels.runtime import INTERPRETED

        if ranks > dist.get_world_size():
            pytest.skip(f"needs {ranks} ranks, the job has {dist.get_world_size()}")
        if interpret != INTERPRETED:
            pytest.skip("the job's ranks run with TRITON_INTERPRET=1" if INTERPRETED else "needs TRITON_INTERPRET=1")
        mine = _run_check(check, args, ranks, self.device)
        failures: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, mine, group=self.control)
        _raise_failures(dict(enumerate(failures)))

    def share(self, value: Any) -> Any:
        """Rank 0's ``value``."""
        shared = [value]
        dist.broadcast_object_list(shared, src=0, group=self.control)
        return shared[0]

    def close(self) -> None:
        dist.destroy_process_group()


class SpawnedRanks:
    """gloo ranks on this machine's CPU. Started when first used; after a failure or hang killed, and started anew
    when next used."""

    def __init__(self, size: int = 4, interpreted_size: int = 2) -> None:
        self._worlds = {False: _World(size, interpret=False), True: _World(interpreted_size, interpret=True)}

    def run(self, check: Check, *args: Any, ranks: int, interpret: bool = False, timeout: float = 120) -> None:
        self._worlds[interpret].run(check, args, ranks, timeout)

    def share(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        for world in self._worlds.values():
            world.stop()


def process_context() -> Any:
    """How to start processes without the interpreter: with what they import already there, since importing takes
    each of them seconds."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cce_dist", "pool", "tolerance"])
    with _interpreter(False):
        forkserver.ensure_running()
    return context


@contextmanager
def _interpreter(interpret: bool) -> Iterator[None]:
    """Whether processes that start here run kernels under the interpreter: read when the kernels are imported."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1" if interpret else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


class _World:
    def __init__(self, size: int, interpret: bool) -> None:
        self.size, self.interpret = size, interpret
        self.processes: list[BaseProcess] = []
        self.connections: list[Connection] = []

    def start(self) -> None:
        context = multiprocessing.get_context("spawn") if self.interpret else process_context()
        rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
        with _interpreter(self.interpret):
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, self.size, str(rendezvous), theirs), daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self.connections.append(ours)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for connection in self.connections:
            connection.close()
        self.processes, self.connections = [], []

    def run(self, check: Check, args: tuple[Any, ...], ranks: int, timeout: float) -> None:
        if ranks > self.size:
            raise ValueError(f"ranks: there are {self.size}, got {ranks}")
        if not self.processes:
            self.start()
        failures: dict[int, str | None] = {}
        waiting = dict(enumerate(self.connections[:ranks]))
        try:
            for connection in waiting.values():
                connection.send((check, args, ranks, timeout))
            deadline = time.monotonic() + timeout
            while waiting:
                ready = wait(list(waiting.values()), max(0, deadline - time.monotonic()))
                if not ready:
                    break
                for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                    try:
                        failures[rank] = waiting[rank].recv()
                    except EOFError:
                        self.processes[rank].join(GRACE)
                        failures[rank] = f"the process died with exit code {self.processes[rank].exitcode}"
                    del waiting[rank]
                    if failures[rank] is not None:
                        deadline = min(deadline, time.monotonic() + GRACE)
            silent = f"rank {', '.join(map(str, waiting))}: no answer" if waiting else ""
            _raise_failures(failures, silent)
        except BaseException:
            # also where the test was interrupted: what the ranks still do concerns nobody
            self.stop()
            raise


def _serve(rank: int, size: int, rendezvous: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
    )
    _make_groups()
    while True:
        try:
            check, args, ranks, timeout = connection.recv()
        except EOFError:
            return
        except Exception:
            # a check that this process cannot import
            connection.send(traceback.format_exc())
            continue
        # says where a rank hangs, shortly before it is killed
        faulthandler.dump_traceback_later(max(1.0, timeout - 1))
        failure = _run_check(check, args, ranks, torch.device("cpu"))
        faulthandler.cancel_dump_traceback_later()
        connection.send(failure)


def alone(group: dist.ProcessGroup, device: torch.device, check: Callable[..., None], *args: Any) -> None:
    """A check of one device, ``check(device, *args)``, on a rank."""
    check(device, *args)
