"""What linear_kl_div takes: errors that name the argument and both values."""

from __future__ import annotations

import math

import torch

from .parallel import dtensor
from .parallel.shard import VocabShard
from .planner import DTYPES, REDUCTIONS, check_budget
from .validation import number_of, shard_of_rows

DIVERGENCES = ("forward", "reverse", "jensen_shannon")

# hidden, weight, bias
Head = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def validate_choices(
    divergence: str,
    beta: float,
    temperature: float,
    student_softcap: float | None,
    teacher_softcap: float | None,
    reduction: str,
    memory_budget: int | str | None,
) -> None:
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence must be one of {', '.join(map(repr, DIVERGENCES))}, got {divergence!r}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    for name, value in (
        ("beta", beta), ("temperature", temperature),
        ("student_softcap", student_softcap), ("teacher_softcap", teacher_softcap),
    ):  # fmt: skip
        if value is None and name.endswith("softcap"):
            continue
        if not 0 < number_of(name, value) < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, got {value}")
    if not beta < 1:
        raise ValueError(
            f"beta must lie between 0 and 1, got {beta}. Towards its ends the divergence vanishes: for what is left "
            'of it there use divergence "forward" or "reverse"'
        )
    check_budget(memory_budget)


def validate_teacher(teacher: Head, top_k: tuple[torch.Tensor, torch.Tensor] | None, divergence: str) -> None:
    """What the teacher is: a head or its top k, and a constant either way."""
    hidden, weight, bias = teacher
    if (hidden is None) != (weight is None):
        missing = "teacher_hidden" if hidden is None else "teacher_weight"
        raise ValueError(f"{missing} is missing: a teacher's head is teacher_hidden and teacher_weight")
    if (hidden is None) == (top_k is None):
        both = "neither" if top_k is None else "both"
        raise ValueError(f"pass either teacher_hidden and teacher_weight or top_k, got {both}")
    if hidden is None and bias is not None:
        raise ValueError("teacher_bias belongs to a teacher's head, and top_k takes its place")
    if top_k is not None and divergence != "forward":
        raise ValueError(
            f'top_k serves divergence "forward" alone, got {divergence!r}, which needs all of the teacher\'s '
            "probabilities: pass teacher_hidden and teacher_weight"
        )
    if top_k is not None and (not isinstance(top_k, (tuple, list)) or len(top_k) != 2):
        raise TypeError(f"top_k must be a pair of tensors (ids, probabilities), got {type(top_k).__name__}")
    ids, probs = (None, None) if top_k is None else top_k
    for name, tensor in (
        ("teacher_hidden", hidden), ("teacher_weight", weight), ("teacher_bias", bias),
        ("the ids of top_k", ids), ("the probabilities of top_k", probs),
    ):  # fmt: skip
        if tensor is None and (top_k is None or name.startswith("teacher")):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.requires_grad:
            raise ValueError(f"{name} requires gradients, of which a teacher gets none: pass .detach()")


def autocast_head(whose: str, head: Head) -> Head:
    """The head as ``torch.nn.functional.linear`` would take it inside ``torch.autocast``."""
    hidden, weight, bias = head
    if hidden is None and whose == "teacher":
        return head
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{whose}_{name} must be a tensor, got {type(tensor).__name__}")
        if dtensor.any_dtensor(tensor):
            raise TypeError(
                f"{whose}_{name} is a DTensor: pass this rank's rows, .to_local(), of weights and biases with "
                "shard=VocabShard.from_dtensor(weight), and hidden states with .full_tensor()"
            )
    assert hidden is not None
    assert weight is not None
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind) or hidden.dtype == torch.float64:
        return head
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def validate_head(whose: str, head: Head) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    hidden, weight, bias = head
    assert hidden is not None
    assert weight is not None
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(
                f"{whose}_{name} is on {tensor.device}, {whose}_hidden on {hidden.device}: expected one device"
            )
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise TypeError(
                f"{whose}_{name} is {tensor.dtype}, {whose}_hidden {hidden.dtype}: expected one dtype; cast one of "
                "them, or call the loss inside torch.autocast"
            )
    if hidden.dtype not in DTYPES:
        raise TypeError(f"{whose}_hidden must be float32, bfloat16, float16 or float64, got {hidden.dtype}")
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise ValueError(
            f"{whose}_hidden must have the shape [..., D] with at least one feature, got {tuple(hidden.shape)}"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{whose}_weight must have the shape [V, {hidden.shape[-1]}] for {whose}_hidden {tuple(hidden.shape)}, "
            f"got {tuple(weight.shape)}. ZeRO-3 and FSDP leave a parameter flat or empty outside the forward of its "
            "module: call the loss inside it"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{whose}_bias must have the shape ({len(weight)},) of {whose}_weight's rows, got {tuple(bias.shape)}"
        )
    return hidden, weight, bias


def validate_pair(
    hidden: torch.Tensor, weight: torch.Tensor, teacher_hidden: torch.Tensor, teacher_weight: torch.Tensor
) -> None:
    if teacher_hidden.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"teacher_hidden must have the shape {tuple(hidden.shape[:-1])} of student_hidden before its last "
            f"dimension, got {tuple(teacher_hidden.shape)}"
        )
    if len(teacher_weight) != len(weight):
        raise ValueError(
            f"teacher_weight must hold the {len(weight)} classes of student_weight, got {len(teacher_weight)} rows"
        )
    if teacher_hidden.device != hidden.device:
        raise ValueError(
            f"teacher_hidden is on {teacher_hidden.device}, student_hidden on {hidden.device}: expected one device"
        )
    if (teacher_hidden.dtype == torch.float64) != (hidden.dtype == torch.float64):
        raise TypeError(
            f"teacher_hidden is {teacher_hidden.dtype}, student_hidden {hidden.dtype}: expected float64 of both or "
            "of neither"
        )


def validate_tokens(
    hidden: torch.Tensor, top_k: tuple[torch.Tensor, torch.Tensor] | None, mask: torch.Tensor | None
) -> None:
    shape = tuple(hidden.shape[:-1])
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            got = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise TypeError(f"mask must be a bool tensor, got {got}")
        if tuple(mask.shape) != shape:
            raise ValueError(f"mask must have the shape {shape} of the tokens, got {tuple(mask.shape)}")
        if mask.device != hidden.device:
            raise ValueError(f"mask is on {mask.device}, student_hidden on {hidden.device}: expected one device")
    if top_k is None:
        return
    ids, probs = top_k
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"the ids of top_k must be int64 or int32, got {ids.dtype}")
    if not probs.dtype.is_floating_point:
        raise TypeError(f"the probabilities of top_k must be floating-point numbers, got {probs.dtype}")
    for name, tensor in (("ids", ids), ("probabilities", probs)):
        if dtensor.any_dtensor(tensor):
            raise TypeError(f"the {name} of top_k are a DTensor: pass .full_tensor()")
        if tensor.device != hidden.device:
            raise ValueError(
                f"the {name} of top_k are on {tensor.device}, student_hidden on {hidden.device}: expected one device"
            )
        if (
            tensor.shape != ids.shape
            or tensor.dim() == 0
            or tuple(tensor.shape[:-1]) != shape
            or not tensor.shape[-1]
        ):
            raise ValueError(
                f"the {name} of top_k must have the shape [*{shape}, K] of the tokens, got {tuple(tensor.shape)}"
            )


def validate_ids(
    top_k: tuple[torch.Tensor, torch.Tensor] | None, mask: torch.Tensor | None, shard: VocabShard
) -> None:
    if top_k is None or top_k[0].device.type != "cpu":
        return
    counted = top_k[0] if mask is None else top_k[0][mask]
    outside = counted[(counted < 0) | (counted >= shard.vocab_size)]
    if len(outside):
        raise IndexError(f"the ids of top_k must lie in [0, {shard.vocab_size}), got {int(outside[0])}")


def validate_shard(weight: torch.Tensor, shard: VocabShard | None) -> VocabShard:
    if isinstance(shard, VocabShard) and shard.sequence_parallel:
        raise ValueError(
            "shard is sequence_parallel, and linear_kl_div takes whole hidden states: gather the ranks' slices and "
            "pass a shard without it"
        )
    return shard_of_rows("student_weight", weight, shard)
