"""Memory that was never written shows: what ``torch.empty`` and its kin return is filled with NaN.

``torch.utils.deterministic.fill_uninitialized_memory`` does the same, but only under deterministic algorithms, which
would replace kernels of torch whose order is what some tests ask about. So the Python entry points are wrapped: they
are what the library calls, on every device, in every thread and under the interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ENTRY_POINTS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


def _fill(tensor: torch.Tensor) -> None:
    if tensor.is_meta or tensor.numel() == 0:
        return
    with torch.no_grad():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            # an id or count so large that nothing reads past it unnoticed
            tensor.fill_(torch.iinfo(tensor.dtype).max)


def _poisoned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = function(*args, **kwargs)
        _fill(tensor)
        return tensor

    return wrapper


@contextmanager
def poisoned_memory() -> Iterator[None]:
    originals = [(owner, name, owner.__dict__.get(name), getattr(owner, name)) for owner, name in _ENTRY_POINTS]
    for owner, name, _, function in originals:
        setattr(owner, name, _poisoned(function))
    try:
        yield
    finally:
        for owner, name, own, _ in originals:
            if own is None:
                # it was inherited
                delattr(owner, name)
            else:
                setattr(owner, name, own)
