"""The public functions: validation and dispatch. The one place that lists every option."""

from __future__ import annotations

import math
import numbers

import torch

from .autograd import LossOptions, MainGrad, TokenLosses, TotalLoss
from .parallel import dtensor
from .parallel.agreement import agree
from .parallel.shard import VocabShard
from .planner import DTYPES, REDUCTIONS, Plan, check_choice, make_plan, plan_request


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    denominator: float | torch.Tensor | None = None,
    shard: VocabShard | None = None,
    memory_budget: int | str | None = None,
    method: str | None = None,
) -> torch.Tensor:
    """Cross-entropy of the logits ``hidden @ weight.T + bias``, which are never held whole.

    After "Cut Your Losses in Large-Vocabulary Language Models" (Wijmans et al., 2024).

    Args:
        hidden: ``[..., D]``, float32, bfloat16, float16, or float64 on CPUs. Equal on all ranks of ``shard.group``,
            or each rank's slice of the sequence where ``shard.sequence_parallel`` says so.
            A DTensor: ``Replicate``, or ``Shard`` of a dimension but the last, the sequence's, whose slices the ranks
            then hold. Beside DTensors a plain tensor counts as replicated.
        weight: ``[V, D]``, hidden's dtype: the classifier, or this rank's rows of it where ``shard`` says so.
            A DTensor with ``Shard(0)`` on one axis of its mesh implies the shard; on other axes it is whole.
            Where a plain one carries an fp32 ``main_grad`` of its shape (Megatron's convention), the products add its
            gradient there, ``grad_added_to_main_grad`` is set, and ``grad`` gets nothing.
        targets: ``[...]``, int64 (or int32), class ids of the whole vocabulary. A DTensor: ``Replicate``.
        bias: ``[V]``, hidden's dtype, sharded as ``weight`` is.
        ignore_index: tokens with this target add nothing to the loss and to any gradient, even where their hidden
            state is NaN.
        reduction: ``"mean"`` over the tokens that are not ignored (0 where there are none), ``"sum"``, or ``"none"``.
        denominator: a number or 0-d tensor that replaces the count of tokens in ``"mean"``: the global count, where
            a step's tokens are spread over micro-batches and data-parallel ranks.
        shard: which rows of the vocabulary ``weight`` holds, and the group whose ranks hold the others. The ranks'
            upstream gradients must be equal, as the losses are. Not needed beside a DTensor weight.
        memory_budget: bytes of workspace, beyond the inputs and their gradients, that a rank may use; ``"min"`` for
            as little as there can be. None: 512 MiB and 12 bytes for each element of ``hidden``.
        method: ``"recompute"`` (four matrix products; the smallest), ``"cached"`` (keeps exponentials of the logits
            for backward, as many as the budget allows; three products where it allows all) or ``"fused"`` (makes the
            gradients in forward, three products; for ``"mean"`` and ``"sum"``). None: the fastest within the budget,
            see :func:`cce_dist.plan`. The loss has the same bits for all of them.

    Returns:
        fp32 (fp64 for fp64 inputs): ``[]``, or the shape of ``targets`` for ``"none"``. The same on every rank.
        In backward ``hidden`` gets its whole gradient on every rank, ``weight`` and ``bias`` that of their rows, each
        in its dtype. Those of DTensors are DTensors, placed as these are; along an axis of the mesh that shards
        ``hidden`` beside the vocabulary's (data parallelism) the loss is that of the rank's own tokens, and the
        gradient of ``weight`` is ``Partial``, the sum over ranks.
        Under autocast the inputs are cast as ``torch.nn.functional.linear`` casts them.

    Raises:
        ValueError: shapes that do not fit, an unknown reduction or method, a denominator without ``"mean"``,
            ``"fused"`` with ``"none"`` or ``main_grad``, float16 with a method that keeps exponentials, a budget that
            nothing fits, a shard that is not the weight's, placements other than those above, DTensors on different
            meshes, ranks that disagree. On every rank of the group, before any work starts; where the group works on
            GPUs, in the first call with a shard and these shapes only, since comparing waits for the device.
        TypeError: arguments of the wrong type or dtype, a plain tensor beside a DTensor that needs one, likewise.
        IndexError: a target outside the vocabulary, on CPUs. On GPUs that token's loss is NaN.
    """
    given = shard if isinstance(shard, VocabShard) else None
    error: Exception | None = None
    main_grad: MainGrad | None = None
    # of the whole tensor: other slices of it are another call
    placements = str(getattr(hidden, "placements", None))
    try:
        main_grad = _main_grad(weight)
        if dtensor.any_dtensor(hidden, weight, bias, targets):
            given = dtensor.group_hint(weight, hidden, bias, targets) or given
            hidden, weight, bias, targets, shard = dtensor.to_local(hidden, weight, bias, targets, shard)
            given = shard
        hidden, targets = dtensor.ready(hidden), dtensor.ready(targets)
        hidden, weight, bias = _autocast(hidden, weight, bias)
        shard = _validate(hidden, weight, targets, bias, ignore_index, reduction, denominator, shard)
        grows = main_grad is not None
        check_choice(hidden.dtype, reduction, memory_budget, method, grows)
        plan = _plan_of(targets.numel(), hidden, weight, bias, shard, reduction, memory_budget, method, grows)
    except (ValueError, TypeError, IndexError) as problem:
        error = problem
    sliced = error is None and shard is not None and shard.sequence_parallel
    same = {} if error is not None else {
        "the shape of hidden": "slices" if sliced else tuple(hidden.shape),
        "sequence_parallel": sliced,
        "the placements of hidden": placements,
        "the width of hidden": hidden.shape[-1],
        "the dtype of hidden": str(hidden.dtype),
        "the shape of targets": tuple(targets.shape),
        "requires_grad of hidden": hidden.requires_grad,
        "the presence of bias": bias is not None,
        "ignore_index": ignore_index,
        "memory_budget": memory_budget,
        "method": method,
        "the presence of main_grad": grows,
        # what the plan depends on
        "whether reduction is none": reduction == "none",
        "whether gradients are recorded": torch.is_grad_enabled(),
    }  # fmt: skip
    device = hidden.device if isinstance(hidden, torch.Tensor) else torch.device("cpu")
    own = tuple(hidden.shape[:-1]) if sliced else None
    shapes = agree(given, same, device, error, targets=targets, own=own)
    assert isinstance(shard, VocabShard)

    dim, lengths = _slices(shapes, tuple(targets.shape)) if sliced else (0, [])
    # the tokens of a rank's slice are neighbours
    labels = torch.cat([part.reshape(-1) for part in targets.split(lengths, dim)]) if dim else targets.reshape(-1)
    labels = labels.to(torch.int64)
    slices = tuple(math.prod(shape) for shape in shapes) if sliced else None
    options = LossOptions(shard=shard, ignore_index=ignore_index, plan=plan, slices=slices, main_grad=main_grad)
    rows = weight if weight.stride(-1) == 1 or weight.numel() == 0 else weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    operands = hidden.reshape(-1, hidden.shape[-1]), rows, bias, labels, options
    if plan.method == "fused":
        total = TotalLoss.apply(*operands)
    else:
        losses = TokenLosses.apply(*operands)
        if reduction == "none":
            if not dim:
                return losses.view(targets.shape)
            assert slices is not None
            return torch.cat(
                [part.view(shape) for part, shape in zip(losses.split(slices), shapes, strict=True)], dim
            )
        total = losses.sum(dtype=torch.float64)
    if reduction == "mean":
        count = (labels != ignore_index).sum()
        if denominator is None:
            divisor: float | torch.Tensor = count
        else:
            divisor = denominator if isinstance(denominator, torch.Tensor) else float(denominator)
        # without a token the loss is 0, whatever the denominator
        total = total / torch.where(count == 0, torch.ones_like(total), divisor)
    return total.to(torch.promote_types(hidden.dtype, torch.float32))


def _slices(shapes: list[tuple[int, ...]], whole: tuple[int, ...]) -> tuple[int, list[int]]:
    """The dimension along which the ranks' slices make up the shape ``whole``, and their lengths."""
    for dim, length in enumerate(whole):
        lengths = [shape[dim] for shape in shapes]
        if sum(lengths) == length and all((*s[:dim], length, *s[dim + 1 :]) == whole for s in shapes):
            return dim, lengths
    raise ValueError(
        f"hidden must be the ranks' slices of the shape {whole} of targets along one dimension, got "
        f"{', '.join(map(str, shapes))}"
    )


def _plan_of(
    num_tokens: int,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    shard: VocabShard,
    reduction: str,
    memory_budget: int | str | None,
    method: str | None,
    main_grad: bool,
) -> Plan:
    request = plan_request(
        num_tokens, hidden.shape[-1], shard.vocab_size, hidden.dtype,
        ranks=1 if shard.group is None else shard.group.size(), device=hidden.device, reduction=reduction,
        memory_budget=memory_budget, method=method, hidden_grad=hidden.requires_grad,
        weight_grad=weight.requires_grad, bias_grad=bias is not None and bias.requires_grad,
        recorded=torch.is_grad_enabled(), main_grad=main_grad, sequence_parallel=shard.sequence_parallel,
    )  # fmt: skip
    return make_plan(*request)


def _main_grad(weight: torch.Tensor) -> MainGrad | None:
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


def _autocast(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The inputs as ``torch.nn.functional.linear`` would take them inside ``torch.autocast``."""
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if not isinstance(tensor, torch.Tensor) and not (name == "bias" and tensor is None):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _validate(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    reduction: str,
    denominator: float | torch.Tensor | None,
    shard: VocabShard | None,
) -> VocabShard:
    if not isinstance(targets, torch.Tensor):
        raise TypeError(f"targets must be a tensor, got {type(targets).__name__}")
    for name, tensor in (("hidden", hidden), ("weight", weight), ("targets", targets), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.device != hidden.device:
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
    if denominator is not None:
        _validate_denominator(denominator, reduction, hidden.device)
    return _validate_shard(weight, targets, ignore_index, shard)


def _validate_denominator(denominator: float | torch.Tensor, reduction: str, device: torch.device) -> None:
    if reduction != "mean":
        raise ValueError(f"denominator takes part in reduction 'mean' alone, got reduction {reduction!r}")
    if dtensor.any_dtensor(denominator):
        raise TypeError("denominator is a DTensor; pass denominator.full_tensor()")
    if isinstance(denominator, torch.Tensor):
        if denominator.dim() != 0:
            raise ValueError(f"denominator must be a number or a 0-d tensor, got shape {tuple(denominator.shape)}")
        if denominator.device != device and denominator.device.type != "cpu":
            raise ValueError(f"denominator is on {denominator.device}, hidden on {device}: expected one device")
    elif isinstance(denominator, bool) or not isinstance(denominator, numbers.Real):
        raise TypeError(f"denominator must be a number or a 0-d tensor, got {type(denominator).__name__}")
    elif not denominator > 0:
        raise ValueError(f"denominator must be above 0, got {denominator}")


def _validate_shard(
    weight: torch.Tensor, targets: torch.Tensor, ignore_index: int, shard: VocabShard | None
) -> VocabShard:
    if shard is None:
        if len(weight) == 0:
            raise ValueError(
                f"weight must hold at least one class, got {tuple(weight.shape)}. ZeRO-3 and FSDP leave a parameter "
                "empty outside the forward of its module: call the loss inside it"
            )
        shard = VocabShard(0, len(weight), len(weight))
    elif not isinstance(shard, VocabShard):
        raise TypeError(f"shard must be a VocabShard, got {type(shard).__name__}")
    elif len(weight) != shard.rows:
        whole = " (that is the whole vocabulary: pass this rank's rows)" if len(weight) == shard.vocab_size else ""
        raise ValueError(
            f"weight must hold the {shard.rows} rows {shard.start} to {shard.stop} of its shard, got "
            f"{len(weight)} rows{whole}"
        )
    if targets.device.type == "cpu" and targets.numel():
        outside = (targets != ignore_index) & ((targets < 0) | (targets >= shard.vocab_size))
        if outside.any():
            raise IndexError(
                f"targets must lie in [0, {shard.vocab_size}) or be ignore_index {ignore_index}, got "
                f"{int(targets[outside][0])}"
            )
    return shard
