from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from poison import poisoned_memory
from pool import JobRanks, SpawnedRanks, alone

from cce_dist.kernels import runtime

_IN_JOB = "RANK" in os.environ and "WORLD_SIZE" in os.environ


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the fuller matrices as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: needs --slow"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="gpu: needs a CUDA device"))


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[JobRanks | SpawnedRanks]:
    """``ranks.run(check, *args, ranks=R)`` runs ``check(group, device, *args)`` on a group of R ranks."""
    these = JobRanks() if _IN_JOB else SpawnedRanks()
    yield these
    these.close()


class WholeWorld:
    """``world.run(check, *args)`` runs ``check(device, *args)`` on all ranks of a world of ``world.size``: for a
    library that keeps the world to itself."""

    def __init__(self, ranks: JobRanks | SpawnedRanks, size: int) -> None:
        self.ranks, self.size = ranks, size

    def run(self, check: Callable[..., None], *args: Any, timeout: float = 240) -> None:
        self.ranks.run(alone, check, *args, ranks=self.size, timeout=timeout)


@pytest.fixture(scope="session")
def world(ranks: JobRanks | SpawnedRanks) -> Iterator[WholeWorld]:
    """Four ranks of their own, or the job's."""
    if _IN_JOB:
        yield WholeWorld(ranks, int(os.environ["WORLD_SIZE"]))
        return
    these = SpawnedRanks()
    yield WholeWorld(these, 4)
    these.close()


@pytest.fixture
def shared_path(ranks: JobRanks | SpawnedRanks, tmp_path: Path) -> Path:
    """A folder that all ranks see."""
    return ranks.share(tmp_path)


@pytest.fixture(params=["twin", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest, ranks: JobRanks | SpawnedRanks) -> Callable[..., None]:
    """``run(check, *args)`` runs ``check(device, *args)``: on the torch twins, on the Triton kernels under the
    interpreter, and on the GPU where there is one."""
    if request.param == "cuda":
        if runtime.INTERPRETED:
            pytest.skip("TRITON_INTERPRET=1 leaves no kernels for the GPU")
        return lambda check, *args: check(torch.device("cuda", torch.cuda.current_device()), *args)
    if request.param == "twin" and runtime.INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 leaves the twins unused")
    if request.param == "twin" or runtime.INTERPRETED:
        return lambda check, *args: check(torch.device("cpu"), *args)
    if not runtime.HAS_TRITON:
        pytest.skip("needs Triton")

    def interpreted(check: Callable[..., None], *args: Any) -> None:
        ranks.run(alone, check, *args, ranks=1, interpret=True)

    return interpreted
