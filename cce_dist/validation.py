"""What is wrong with a call's arguments, before any kernel or collective starts."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import torch

from .autograd import MainGrad
from .parallel import dtensor
from .parallel.shard import VocabShard
from .planner import DTYPES, REDUCTIONS


@dataclass
class Arguments:
    """Those of a call of :func:`~cce_dist.linear_cross_entropy` or :func:`~cce_dist.linear_log_probs`, and what it is
    to return: ``stats`` beside the loss, ``entropy`` to differentiate."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    bias: torch.Tensor | None
    ignore_index: int
    logit_scale: float | torch.Tensor
    softcap: float | None
    shard: VocabShard | None
    memory_budget: int | str | None
    reduction: str = "none"
    denominator: float | torch.Tensor | None = None
    token_weight: torch.Tensor | None = None
    class_weight: torch.Tensor | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    method: str | None = None
    stats: bool = False
    entropy: bool = False

    def check_types(self) -> None:
        """That tensors are tensors, before anything is asked of them."""
        for name in ("hidden", "weight", "targets", "bias", "token_weight", "class_weight"):
            tensor = getattr(self, name)
            if tensor is None and name in ("bias", "token_weight", "class_weight"):
                continue
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")

    def to_local(self) -> None:
        """Takes this rank's plain tensors of DTensors."""
        for name in ("logit_scale", "class_weight", "denominator"):
            if dtensor.any_dtensor(getattr(self, name)):
                raise TypeError(f"{name} is a DTensor; pass {name}.full_tensor()")
        if dtensor.any_dtensor(self.token_weight):
            placements = getattr(self.targets, "placements", None)
            assert self.token_weight is not None
            if self.token_weight.placements != placements:  # type: ignore[attr-defined]
                raise TypeError(
                    f"token_weight is a DTensor with the placements {self.token_weight.placements}, "  # type: ignore[attr-defined]
                    f"expected those of targets, {placements or 'a plain tensor'}"
                )
            self.token_weight = self.token_weight.to_local()  # type: ignore[attr-defined]
        if dtensor.any_dtensor(self.hidden, self.weight, self.bias, self.targets):
            self.hidden, self.weight, self.bias, self.targets, self.shard = dtensor.to_local(
                self.hidden, self.weight, self.bias, self.targets, self.shard
            )
        self.hidden, self.targets = dtensor.ready(self.hidden), dtensor.ready(self.targets)

    def autocast(self) -> None:
        """Casts as ``torch.nn.functional.linear`` does inside ``torch.autocast``."""
        kind = self.hidden.device.type
        if not torch.is_autocast_enabled(kind) or self.hidden.dtype == torch.float64:
            return
        dtype = torch.get_autocast_dtype(kind)
        self.hidden, self.weight = self.hidden.to(dtype), self.weight.to(dtype)
        self.bias = None if self.bias is None else self.bias.to(dtype)


def main_grad_of(weight: torch.Tensor) -> MainGrad | None:
    """The gradient in full precision that ``weight`` carries, if it does. A frozen one may: the ranks plan as if it
    grew."""
    tensor = getattr(weight, "main_grad", None)
    if not isinstance(tensor, torch.Tensor) or dtensor.any_dtensor(weight, tensor):
        return None
    if tensor.dtype != torch.promote_types(weight.dtype, torch.float32):
        # who reads it adds the usual gradient
        return None
    if tensor.shape != weight.shape or tensor.device != weight.device or not tensor.is_contiguous():
        raise ValueError(
            f"weight.main_grad must be contiguous, on {weight.device} and of weight's shape {tuple(weight.shape)}, "
            f"got {tuple(tensor.shape)} with the strides {tensor.stride()} on {tensor.device}"
        )
    return MainGrad(tensor, weight)


def validate(given: Arguments) -> VocabShard:
    """The shard that the weight is, after what :class:`Arguments` itself checks. Raises ``ValueError``, ``TypeError``
    or ``IndexError``."""
    hidden, weight, targets, bias = given.hidden, given.weight, given.targets, given.bias
    shard, ignore_index, reduction = given.shard, given.ignore_index, given.reduction
    for name in ("hidden", "weight", "targets", "bias", "token_weight", "class_weight", "logit_scale"):
        tensor = getattr(given, name)
        if isinstance(tensor, torch.Tensor) and tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, hidden on {hidden.device}: expected one device")
    if hidden.dim() == 0:
        raise ValueError("hidden must have the shape [..., D], got a scalar")
    if weight.dim() != 2:
        raise ValueError(
            f"weight must have the shape [V, {hidden.shape[-1]}], got {tuple(weight.shape)}. ZeRO-3 and FSDP leave a "
            "parameter flat or empty outside the forward of its module: call the loss inside it"
        )
    if weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight must have the shape [V, {hidden.shape[-1]}] for hidden {tuple(hidden.shape)}, "
            f"got {tuple(weight.shape)}"
        )
    if hidden.shape[-1] == 0:
        raise ValueError(f"hidden must have at least one feature, got the shape {tuple(hidden.shape)}")
    if isinstance(shard, VocabShard) and shard.sequence_parallel:
        # the ranks' slices are looked at together
        if targets.dim() == 0 or targets.dim() != hidden.dim() - 1:
            raise ValueError(
                f"targets must have the {hidden.dim() - 1} dimensions of the slices of hidden, here "
                f"{tuple(hidden.shape)}, without the last, got the shape {tuple(targets.shape)}"
            )
    elif targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets must have the shape {tuple(hidden.shape[:-1])} of hidden {tuple(hidden.shape)} without its "
            f"last dimension, got {tuple(targets.shape)}"
        )
    if hidden.dtype not in DTYPES:
        raise TypeError(f"hidden must be float32, bfloat16, float16 or float64, got {hidden.dtype}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise TypeError(
                f"{name} is {tensor.dtype}, hidden {hidden.dtype}: expected one dtype; cast one of them, or call the "
                "loss inside torch.autocast"
            )
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets must be int64 or int32 class ids, got {targets.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have the shape ({len(weight)},) of weight's rows, got {tuple(bias.shape)}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {type(ignore_index).__name__}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    if given.denominator is not None:
        validate_denominator(given.denominator, reduction, hidden.device)
    _validate_logits(given)
    _validate_token_weight(given)
    shard = validate_shard(weight, targets, ignore_index, given.shard)
    _validate_objective(given, shard.vocab_size)
    return shard


def validate_denominator(denominator: float | torch.Tensor, reduction: str, device: torch.device) -> None:
    if reduction != "mean":
        raise ValueError(f"denominator takes part in reduction 'mean' alone, got reduction {reduction!r}")
    if isinstance(denominator, torch.Tensor):
        if denominator.dim() != 0:
            raise ValueError(f"denominator must be a number or a 0-d tensor, got shape {tuple(denominator.shape)}")
        if denominator.device != device and denominator.device.type != "cpu":
            raise ValueError(f"denominator is on {denominator.device}, hidden on {device}: expected one device")
    elif isinstance(denominator, bool) or not isinstance(denominator, numbers.Real):
        raise TypeError(f"denominator must be a number or a 0-d tensor, got {type(denominator).__name__}")
    elif not denominator > 0:
        raise ValueError(f"denominator must be above 0, got {denominator}")


def _validate_logits(given: Arguments) -> None:
    scale, softcap = given.logit_scale, given.softcap
    if isinstance(scale, torch.Tensor):
        if scale.dim() != 0:
            raise ValueError(f"logit_scale must be a number or a 0-d tensor, got shape {tuple(scale.shape)}")
        if not scale.is_floating_point():
            raise TypeError(f"logit_scale must be a floating-point tensor, got {scale.dtype}")
    elif not math.isfinite(number_of("logit_scale", scale)):
        raise ValueError(f"logit_scale must be finite, got {scale}")
    if softcap is not None and not 0 < number_of("softcap", softcap) < math.inf:
        raise ValueError(f"softcap must be above 0 and finite, got {softcap}; None for none")


def _validate_token_weight(given: Arguments) -> None:
    weight = given.token_weight
    if weight is None:
        return
    if weight.shape != given.targets.shape:
        raise ValueError(
            f"token_weight must have the shape {tuple(given.targets.shape)} of targets, got {tuple(weight.shape)}"
        )
    if not weight.is_floating_point():
        raise TypeError(f"token_weight must be floating-point, got {weight.dtype}")


def _validate_objective(given: Arguments, vocab_size: int) -> None:
    if not 0 <= number_of("label_smoothing", given.label_smoothing) <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {given.label_smoothing}")
    if not 0 <= number_of("z_loss", given.z_loss) < math.inf:
        raise ValueError(f"z_loss must be at least 0 and finite, got {given.z_loss}")
    weight = given.class_weight
    if weight is None:
        return
    if weight.shape != (vocab_size,):
        raise ValueError(
            f"class_weight must have the shape ({vocab_size},) of the whole vocabulary, got {tuple(weight.shape)}"
        )
    if not weight.is_floating_point():
        raise TypeError(f"class_weight must be floating-point, got {weight.dtype}")
    if weight.requires_grad:
        raise ValueError("class_weight requires grad, and has no gradient here: pass class_weight.detach()")


def number_of(name: str, value: object) -> float:
    """Raises ``TypeError`` where the argument ``name`` is no number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    return float(value)


def shard_of_rows(name: str, weight: torch.Tensor, shard: VocabShard | None) -> VocabShard:
    """The shard whose rows the argument ``name`` holds, all of a vocabulary where None was passed."""
    if shard is None:
        if len(weight) == 0:
            raise ValueError(
                f"{name} must hold at least one class, got {tuple(weight.shape)}. ZeRO-3 and FSDP leave a parameter "
                "empty outside the forward of its module: call the loss inside it"
            )
        return VocabShard(0, len(weight), len(weight))
    if not isinstance(shard, VocabShard):
        raise TypeError(f"shard must be a VocabShard, got {type(shard).__name__}")
    if len(weight) != shard.rows:
        whole = " (that is the whole vocabulary: pass this rank's rows)" if len(weight) == shard.vocab_size else ""
        raise ValueError(
            f"{name} must hold the {shard.rows} rows {shard.start} to {shard.stop} of its shard, got "
            f"{len(weight)} rows{whole}"
        )
    return shard


def validate_shard(
    weight: torch.Tensor, targets: torch.Tensor, ignore_index: int, shard: VocabShard | None
) -> VocabShard:
    shard = shard_of_rows("weight", weight, shard)
    if targets.device.type == "cpu" and targets.numel():
        outside = (targets != ignore_index) & ((targets < 0) | (targets >= shard.vocab_size))
        if outside.any():
            raise IndexError(
                f"targets must lie in [0, {shard.vocab_size}) or be ignore_index {ignore_index}, got "
                f"{int(targets[outside][0])}"
            )
    return shard
