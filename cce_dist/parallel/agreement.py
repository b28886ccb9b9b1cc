"""A call's ranks compare what they were given before anything can hang on a difference."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from .collectives import rank_and_size
from .shard import VocabShard

_ERRORS: dict[str, type[Exception]] = {e.__name__: e for e in (ValueError, TypeError, IndexError)}


def agree(
    shard: VocabShard | None,
    same: Mapping[str, Any],
    device: torch.device,
    error: Exception | None,
    *,
    targets: torch.Tensor | None = None,
    tokens: str = "targets",
    own: Any = None,
) -> list[Any]:
    """Raises on every rank of the shard's group what is wrong on any, or where the ranks differ in an entry of
    ``same`` or in ``targets``, which the message calls ``tokens``, or where their rows do not tile the vocabulary.
    ``error`` is what this rank itself found wrong. Returns what each rank has as ``own``, in which they may differ.

    Groups on CPUs compare at every call. Groups on GPUs, where comparing waits for the device, do so once for each
    shard and ``same``: there ``own`` must not change.
    """
    if shard is None or shard.group is None or shard.group.size() == 1:
        if error is not None:
            raise error
        return [own]
    # what was compared is remembered with the shard, not with its group: shards of two layouts can be equal on one
    # rank and differ on another, and all ranks must come to the same decision
    signature = tuple(same.items())
    if error is None and _comparing_waits(device) and signature in shard.agreed:
        told = shard.agreed[signature]
        before = told[rank_and_size(shard.group)[0]]
        if before != own:
            # the others may have what they had, and would not compare
            raise ValueError(
                f"hidden: this rank's slice has the shape {own}, and had {before} in an earlier call with targets of "
                "this shape. Ranks on GPUs tell each other once for a shard: make another VocabShard for other slices"
            )
        return told
    told = [None] * shard.group.size()
    same = {**same, "vocab_size": shard.vocab_size}
    if targets is not None and error is None:
        # data-parallel ranks that are taken for tensor-parallel ones have other tokens
        places = torch.arange(1, targets.numel() + 1, device=targets.device)
        same[f"a checksum of {tokens}"] = int((targets.reshape(-1) * places).sum())
    mine = (
        None if error is None else (type(error).__name__, str(error)),
        same,
        (shard.start, shard.stop),
        own,
    )
    # the object collective uses the current device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        dist.all_gather_object(told, mine, group=shard.group)  # collective
    _raise_if_wrong(told, rank_and_size(shard.group)[0], error)
    shard.agreed[signature] = [theirs for *_, theirs in told]
    return shard.agreed[signature]


def _comparing_waits(device: torch.device) -> bool:
    return device.type == "cuda"


def _raise_if_wrong(told: list[Any], rank: int, error: Exception | None) -> None:
    if error is not None:
        raise error
    for other, (failure, *_) in enumerate(told):
        if failure is not None:
            name, message = failure
            raise _ERRORS.get(name, RuntimeError)(f"rank {other} of the group (this is rank {rank}): {message}")
    first = told[0][1]
    for other, (_, theirs, *_) in enumerate(told):
        for name, value in theirs.items():
            if value != first[name]:
                raise ValueError(
                    f"{name} must be the same on every rank of the group: "
                    f"rank 0 has {first[name]}, rank {other} {value}"
                )
    end = 0
    for start, stop in sorted(bounds for _, _, bounds, _ in told):
        if start != end:
            break
        end = stop
    else:
        if end >= first["vocab_size"]:
            return
    bounds = ", ".join(f"{start}:{stop}" for _, _, (start, stop), _ in told)
    size = first["vocab_size"]
    raise ValueError(
        f"shard: the ranks' rows must tile the vocabulary of {size} without gap or overlap, got {bounds}"
    )
