"""Which backend serves a tensor. Imports Triton where there is one, so that the package loads where there is none."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    HAS_TRITON = True
    # the interpreter runs kernels on CPU tensors; it is chosen before the kernels are defined and cannot change after
    INTERPRETED = bool(triton.knobs.runtime.interpret)
except ImportError:
    HAS_TRITON = INTERPRETED = False

    class triton:  # type: ignore[no-redef]  # noqa: N801
        """Lets the kernels be defined; nothing calls them."""

        jit = staticmethod(lambda function: function)

    class tl:  # type: ignore[no-redef]  # noqa: N801
        """Lets the kernels' signatures be read."""

        constexpr = staticmethod(lambda value=None: value)

    TensorDescriptor: Any = None  # type: ignore[no-redef]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return cdiv(a, b) * b


@functools.cache
def target_of(device: torch.device) -> str:
    """The chip a device is: ``sm_90``, ``gfx942``, or ``cpu``."""
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    # its tiles are dealt out first: communication waits for them
    return torch.cuda.Stream(device, priority=-1)


class SecondStream:
    """Lets kernels run beside those that the caller queues next: the last tiles of one product leave multiprocessors
    idle, which the other's first ones take. On CPUs nothing runs beside anything."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.busy = device, False

    @contextmanager
    def beside(self) -> Iterator[None]:
        """The kernels inside start after what the current stream holds, and run beside what it gets up to
        :meth:`join`. What they use, and what is allocated inside, must not be freed before that."""
        if self.device.type != "cuda":
            yield
            return
        stream, self.busy = _second_stream(self.device), True
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """What the current stream gets from here on starts after what ran beside it."""
        # a stream that holds nothing of this is none of a CUDA graph's that is being captured
        if self.busy:
            torch.cuda.current_stream(self.device).wait_stream(_second_stream(self.device))
            self.busy = False


def triton_serves(tensor: torch.Tensor) -> bool:
    """Whether the Triton kernels take this tensor; the torch twins take any."""
    return tensor.dtype != torch.float64 and _triton_runs_on(tensor.device)


@functools.cache
def _triton_runs_on(device: torch.device) -> bool:
    if not HAS_TRITON:
        return False
    if device.type != "cuda":
        return INTERPRETED
    # older chips lack the bf16 instructions that the kernels are built of
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)


def has_tma(target: str) -> bool:
    return target.startswith("sm_") and int(target[3:]) >= 90


def descriptors_fit(target: str, *matrices: torch.Tensor) -> bool:
    """Whether the chip's copy engine can fetch tiles of these matrices: rows contiguous and aligned to 16 bytes."""
    # fp32 products run on the plain arithmetic units, whose operands come through registers: there it only spills
    engine = target == "cpu" or (has_tma(target) and all(t.element_size() == 2 for t in matrices))
    return engine and all(
        t.stride(1) == 1
        and t.stride(0) > 0
        and t.stride(0) * t.element_size() % 16 == 0
        and t.data_ptr() % 16 == 0
        and t.numel() > 0
        for t in matrices
    )


def panel_columns(panel: torch.Tensor) -> int:
    """The columns of a panel [n, width], or of one in slabs [P, n, slab]."""
    return panel.shape[-1] * (len(panel) if panel.dim() == 3 else 1)


def as_matrix(panel: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """(matrix, slab, rows) of a panel: itself, 0, 0, or of slabs these one below the other, the columns of one and
    the rows from one to the next. See :func:`tiles.slab_place`."""
    if panel.dim() == 2:
        return panel, 0, 0
    (slabs, n, slab), rows = panel.shape, panel.stride(0) // panel.stride(1)
    return panel.as_strided(((slabs - 1) * rows + n, slab), panel.stride()[1:]), slab, rows


def tile_source(matrix: torch.Tensor, block: tuple[int, int], tma: bool) -> Any:
    """What a kernel fetches tiles of ``matrix`` from: a tensor descriptor, or the tensor itself."""
    return TensorDescriptor.from_tensor(matrix, list(block)) if tma else matrix
