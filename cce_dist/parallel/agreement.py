"""A call's ranks compare what they were given before anything can hang on a difference."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .collectives import rank_and_size

# signatures that a group has agreed on: comparing them again would cost the device's queue
_agreed: WeakKeyDictionary[dist.ProcessGroup, set[tuple[Any, ...]]] = WeakKeyDictionary()

_ERRORS: dict[str, type[Exception]] = {e.__name__: e for e in (ValueError, TypeError, IndexError)}


def agree(
    group: dist.ProcessGroup | None,
    same: Mapping[str, Any],
    bounds: tuple[int, int],
    vocab_size: int,
    device: torch.device,
    error: Exception | None,
) -> None:
    """Raises on every rank what is wrong on any, or where the ranks differ in an entry of ``same``, or where their
    ``bounds`` do not tile the vocabulary.

    Groups on CPUs compare at every call. Groups on GPUs, where comparing waits for the device, do so once for each
    signature.
    """
    if group is None or group.size() == 1:
        if error is not None:
            raise error
        return
    signature = (*same.items(), bounds, vocab_size)
    known = _agreed.setdefault(group, set())
    if error is None and device.type == "cuda" and signature in known:
        return
    told: list[Any] = [None] * group.size()
    mine = (None if error is None else (type(error).__name__, str(error)), dict(same), bounds, vocab_size)
    # the object collective uses the current device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        dist.all_gather_object(told, mine, group=group)  # collective
    _raise_if_wrong(told, rank_and_size(group)[0], error)
    known.add(signature)


def _raise_if_wrong(told: list[Any], rank: int, error: Exception | None) -> None:
    if error is not None:
        raise error
    for other, (failure, *_) in enumerate(told):
        if failure is not None:
            name, message = failure
            raise _ERRORS.get(name, RuntimeError)(f"rank {other} of the group (this is rank {rank}): {message}")
    _, first, _, first_size = told[0]
    for other, (_, theirs, _, size) in enumerate(told):
        for name, value in [*theirs.items(), ("vocab_size", size)]:
            expected = first_size if name == "vocab_size" else first[name]
            if value != expected:
                raise ValueError(
                    f"{name} must be the same on every rank of the group: rank 0 has {expected}, rank {other} {value}"
                )
    end = 0
    for start, stop in sorted(bounds for _, _, bounds, _ in told):
        if start != end:
            break
        end = stop
    else:
        if end >= first_size:
            return
    bounds = [f"{start}:{stop}" for _, _, (start, stop), _ in told]
    raise ValueError(
        f"shard: the ranks' rows must tile the vocabulary of {first_size} without gap or overlap, got "
        + ", ".join(bounds)
    )
