"""The public functions: validation and dispatch. The one place that lists every option."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import torch

from .autograd import LossInputs, LossOptions, TokenLosses, TokenValues, TotalLoss
from .operators import operator
from .parallel import dtensor
from .parallel.agreement import agree
from .parallel.shard import VocabShard
from .planner import Plan, check_choice, make_plan, plan_request
from .validation import Arguments, main_grad_of, validate


class TokenStats(NamedTuple):
    """What is known of each token, for metrics: detached, each of the shape of ``targets``, the same on every rank.

    | field | dtype | | of an ignored token |
    |---|---|---|---|
    | lse | fp32 (fp64 for fp64) | the log-sum-exp of its logits | 0 |
    | log_prob | likewise | the target's log-probability | 0 |
    | entropy | likewise | of the softmax, in nats | 0 |
    | argmax | int64 | the class with the largest logit, the lowest of several | -1 |
    """

    lse: torch.Tensor
    log_prob: torch.Tensor
    entropy: torch.Tensor
    argmax: torch.Tensor


def _empty_loss(
    hidden: torch.Tensor, targets: torch.Tensor, reduction: str = "mean", return_stats: bool = False, **_: Any
) -> list[torch.Tensor]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    tokens = torch.empty(targets.shape, dtype=wide, device=hidden.device)
    stats = [torch.empty_like(tokens) for _ in range(3)] + [torch.empty_like(tokens, dtype=torch.int64)]
    return [tokens if reduction == "none" else tokens.new_empty(()), *(stats if return_stats else [])]


def _pack_loss(outputs: list[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, TokenStats]:
    loss, *stats = outputs
    return (loss, TokenStats(*(x.detach() for x in stats))) if stats else loss


@overload
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    return_stats: Literal[True],
    **options: Any,
) -> tuple[torch.Tensor, TokenStats]: ...


@overload
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    return_stats: Literal[False] = False,
    **options: Any,
) -> torch.Tensor: ...


# the one list of options: the signatures above take any
@operator(_empty_loss, _pack_loss)  # type: ignore[misc]
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    denominator: float | torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    logit_scale: float | torch.Tensor = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    shard: VocabShard | None = None,
    memory_budget: int | str | None = None,
    method: str | None = None,
    return_stats: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, TokenStats]:
    """Cross-entropy of the logits ``hidden @ weight.T + bias``, which are never held whole.

    With ``x = softcap tanh(logit_scale (hidden @ weight.T + bias) / softcap)`` over the ``K`` classes of the
    vocabulary, ``w`` their weights and ``t`` the target, the loss of a token is

    ``(1 - label_smoothing) w_t (lse - x_t) + label_smoothing / K sum_j w_j (lse - x_j) + z_loss w_t lse^2``

    times its ``token_weight``; the first two terms are those of ``torch.nn.functional.cross_entropy``.

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
        token_weight: ``[...]`` as ``targets``, floating-point: multiplies each token's loss; ``"mean"`` then divides
            by the sum of the weights of the tokens that are not ignored. May ask for a gradient. A DTensor: placed as
            ``targets``.
        class_weight: ``[vocab_size]``, floating-point, of the whole vocabulary on every rank: as the ``weight`` of
            ``torch.nn.functional.cross_entropy``; ``"mean"`` divides by the sum of the targets' weights. No gradient.
        logit_scale: multiplies the logits, a number or a 0-d floating-point tensor, which may ask for a gradient.
        softcap: bounds the logits to ``+-softcap``; above 0, None for none.
        label_smoothing: in [0, 1].
        z_loss: at least 0; its term, of the normaliser's square, is that of Chowdhery et al. (2022).
        shard: which rows of the vocabulary ``weight`` holds, and the group whose ranks hold the others. The ranks'
            upstream gradients must be equal, as the losses are. Not needed beside a DTensor weight.
        memory_budget: bytes of workspace, beyond the inputs and their gradients, that a rank may use; ``"min"`` for
            as little as there can be. None: 512 MiB and 12 bytes for each element of ``hidden``.
        method: ``"recompute"`` (four matrix products; the smallest), ``"cached"`` (keeps exponentials of the logits
            for backward, in the memory of the classifier's gradient and as many more as the budget allows; three
            products where that is all) or ``"fused"`` (makes the gradients in forward, three products; for ``"mean"``
            and ``"sum"``). The last two hold memory from forward to backward, up to the classifier's gradient and
            more: ``held`` of the plan. None: the fastest within the budget, see :func:`cce_dist.plan`. The loss has
            the same bits for all of them.
        return_stats: whether to return a :class:`TokenStats` as well.

    Returns:
        fp32 (fp64 for fp64 inputs): ``[]``, or the shape of ``targets`` for ``"none"``. The same on every rank.
        With ``return_stats`` a tuple of it and the statistics.
        In backward ``hidden`` gets its whole gradient on every rank, ``weight`` and ``bias`` that of their rows, each
        in its dtype. Those of DTensors are DTensors, placed as these are; along an axis of the mesh that shards
        ``hidden`` beside the vocabulary's (data parallelism) the loss is that of the rank's own tokens, and the
        gradient of ``weight`` is ``Partial``, the sum over ranks.
        Under autocast the inputs are cast as ``torch.nn.functional.linear`` casts them.

    Raises:
        ValueError: shapes that do not fit, an unknown reduction or method, numbers outside the bounds above, a
            denominator without ``"mean"``, ``"fused"`` with ``"none"``, ``main_grad`` or a ``token_weight`` that
            requires grad, a method that keeps exponentials with float16 or with ``softcap`` and ``label_smoothing``
            together, a ``class_weight`` that requires grad, a budget that nothing fits, a shard that is not the
            weight's, placements other than those above, DTensors on different meshes, ranks that disagree. On every
            rank of the group, before any work starts; where the group works on GPUs, in the first call with a shard
            and these shapes and options only, since comparing waits for the device.
        TypeError: arguments of the wrong type or dtype, a plain tensor beside a DTensor that needs one, likewise.
        IndexError: a target outside the vocabulary, on CPUs. On GPUs that token's loss is NaN.
    """
    given = Arguments(
        hidden, weight, targets, bias, ignore_index, logit_scale, softcap, shard, memory_budget, reduction,
        denominator, token_weight, class_weight, label_smoothing, z_loss, method, stats=return_stats,
    )  # fmt: skip
    call = _start(given)
    labels, factor = call.inputs.targets, call.token_weight
    if call.options.plan.method == "fused":
        total, *rest = TotalLoss.apply(*call.inputs, None if factor is None else factor.detach(), call.options)
        values = TokenValues(*rest)
    else:
        values = TokenValues(*TokenLosses.apply(*call.inputs, call.options))
        losses = values.loss if factor is None else values.loss * factor
        total = losses.sum(dtype=torch.float64)
    if reduction == "none":
        loss = call.shaped(losses)
    else:
        if reduction == "mean":
            count = (labels != ignore_index).sum()
            divisor: float | torch.Tensor
            if denominator is not None:
                divisor = denominator if isinstance(denominator, torch.Tensor) else float(denominator)
            else:
                divisor = count if call.divided is None else call.divided.sum(dtype=torch.float64)
            # without a token the loss is 0, whatever the denominator, and where no token weighs anything
            nothing = count == 0
            if call.divided is not None:
                nothing = nothing | ((divisor == 0) & (total == 0))
            total = torch.where(nothing, 0, total / torch.where(nothing, torch.ones_like(total), divisor))
        loss = total.to(torch.promote_types(call.inputs.hidden.dtype, torch.float32))
    if not return_stats:
        return loss
    return loss, TokenStats(*(call.shaped(x.detach()) for x in values.stats()))


def _empty_log_probs(
    hidden: torch.Tensor, targets: torch.Tensor, return_entropy: bool = False, **_: Any
) -> list[torch.Tensor]:
    tokens = torch.empty(targets.shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    return [tokens, torch.empty_like(tokens)] if return_entropy else [tokens]


@overload
def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    return_entropy: Literal[True],
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    return_entropy: Literal[False] = False,
    **options: Any,
) -> torch.Tensor: ...


@operator(_empty_log_probs, lambda outputs: outputs[0] if len(outputs) == 1 else tuple(outputs))  # type: ignore[misc]
def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    logit_scale: float | torch.Tensor = 1.0,
    softcap: float | None = None,
    shard: VocabShard | None = None,
    memory_budget: int | str | None = None,
    return_entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of each token's target, and the entropy of its softmax, without the logits: for
    policy-gradient training.

    A token's numbers have the same bits whatever the other tokens of the batch and, where shards meet tile bounds,
    whatever the number of ranks: a trainer and a scorer of the same weights agree. For a temperature of each token
    scale the hidden states, ``hidden / temperature[..., None]`` (of a head without bias), for one temperature
    ``logit_scale=1 / temperature``.

    Args: as in :func:`linear_cross_entropy`.
        return_entropy: whether to return the entropies too. Both are differentiable, also together; the gradient of
            the entropy is made by the method ``"recompute"``.

    Returns:
        ``[...]`` as ``targets``, fp32 (fp64 for fp64 inputs), 0 for ignored tokens; with ``return_entropy`` a tuple
        of the log-probabilities and the entropies, in nats. The same on every rank.

    Raises: as :func:`linear_cross_entropy`.
    """
    given = Arguments(
        hidden,
        weight,
        targets,
        bias,
        ignore_index,
        logit_scale,
        softcap,
        shard,
        memory_budget,
        entropy=return_entropy,
    )
    call = _start(given)
    values = TokenValues(*TokenLosses.apply(*call.inputs, call.options))
    log_probs = call.shaped(-values.loss)
    if not return_entropy:
        return log_probs
    assert values.entropy is not None
    return log_probs, call.shaped(values.entropy)


@dataclass(frozen=True)
class _Call:
    """A call whose arguments are right on every rank: tokens in the order of the ranks' slices, one behind another.

    ``token_weight`` [N] is what each token's loss is multiplied with outside of the kernels, None for 1; ``divided``
    [N] what ``"mean"`` divides by the sum of, None for the count.
    """

    inputs: LossInputs
    options: LossOptions
    token_weight: torch.Tensor | None
    divided: torch.Tensor | None
    shape: torch.Size
    # of slices along a dimension but the first: that, and their shapes
    dim: int
    parts: list[tuple[int, ...]]

    def shaped(self, tokens: torch.Tensor) -> torch.Tensor:
        """[N] -> the shape of targets."""
        if not self.dim:
            return tokens.view(self.shape)
        slices = tokens.split([math.prod(part) for part in self.parts])
        return torch.cat([x.view(part) for x, part in zip(slices, self.parts, strict=True)], self.dim)


def _start(given: Arguments) -> _Call:
    """Checks, casts and flattens the arguments, and has the ranks agree."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "linear_cross_entropy and linear_log_probs do not take part in torch.func transforms (grad, vmap, jvp): "
            "use torch.autograd"
        )
    hint = given.shard if isinstance(given.shard, VocabShard) else None
    error: Exception | None = None
    main_grad = shard = None
    # of the whole tensor: other slices of it are another call
    placements = str(getattr(given.hidden, "placements", None))
    try:
        given.check_types()
        main_grad = main_grad_of(given.weight)
        if dtensor.any_dtensor(given.hidden, given.weight, given.bias, given.targets):
            hint = dtensor.group_hint(given.weight, given.hidden, given.bias, given.targets) or hint
        given.to_local()
        hint = given.shard if isinstance(given.shard, VocabShard) else hint
        given.autocast()
        shard = validate(given)
        plan = _plan_of(given, shard, main_grad is not None)
    except (ValueError, TypeError, IndexError) as problem:
        error = problem
    hidden, targets = given.hidden, given.targets
    sliced = error is None and shard is not None and shard.sequence_parallel
    scale = given.logit_scale
    same = {} if error is not None else {
        "the shape of hidden": "slices" if sliced else tuple(hidden.shape),
        "sequence_parallel": sliced,
        "the placements of hidden": placements,
        "the width of hidden": hidden.shape[-1],
        "the dtype of hidden": str(hidden.dtype),
        "the shape of targets": tuple(targets.shape),
        "requires_grad of hidden": hidden.requires_grad,
        "the presence of bias": given.bias is not None,
        "ignore_index": given.ignore_index,
        "memory_budget": given.memory_budget,
        "method": given.method,
        "the presence of main_grad": main_grad is not None,
        "logit_scale": "a tensor" if isinstance(scale, torch.Tensor) else float(scale),
        "requires_grad of logit_scale": isinstance(scale, torch.Tensor) and scale.requires_grad,
        "softcap": given.softcap,
        "label_smoothing": given.label_smoothing,
        "z_loss": given.z_loss,
        "the presence of class_weight": given.class_weight is not None,
        "the presence of token_weight": given.token_weight is not None,
        "return_stats": given.stats,
        "return_entropy": given.entropy,
        # what the plan depends on
        "whether reduction is none": given.reduction == "none",
        "requires_grad of token_weight": given.token_weight is not None and given.token_weight.requires_grad,
        "whether gradients are recorded": torch.is_grad_enabled(),
    }  # fmt: skip
    device = hidden.device if isinstance(hidden, torch.Tensor) else torch.device("cpu")
    own = tuple(hidden.shape[:-1]) if sliced else None
    shapes = agree(hint, same, device, error, targets=targets, own=own)
    assert isinstance(shard, VocabShard)

    dim, lengths = _slices(shapes, tuple(targets.shape)) if sliced else (0, [])

    def flat(tokens: torch.Tensor) -> torch.Tensor:
        # the tokens of a rank's slice are neighbours
        return torch.cat([part.reshape(-1) for part in tokens.split(lengths, dim)]) if dim else tokens.reshape(-1)

    wide = torch.promote_types(hidden.dtype, torch.float32)
    labels = flat(targets).to(torch.int64)
    token_weight = divided = class_weight = None
    if given.token_weight is not None:
        valid = labels != given.ignore_index
        token_weight = divided = torch.where(valid, flat(given.token_weight).to(wide), 0)
    if given.class_weight is not None:
        class_weight = given.class_weight.to(wide).contiguous()
        own_weight = class_weight[labels.clamp(0, shard.vocab_size - 1)]
        own_weight = torch.where(labels != given.ignore_index, own_weight, 0)
        divided = own_weight if token_weight is None else token_weight * own_weight
        if not given.label_smoothing:
            # a factor of the token's loss and nothing else
            token_weight, class_weight = divided, None
    logit_scale = None
    if isinstance(scale, torch.Tensor):
        logit_scale = scale.to(wide)
    elif scale != 1:
        logit_scale = torch.full((), float(scale), dtype=wide, device=device)
    options = LossOptions(
        shard=shard, ignore_index=given.ignore_index, plan=plan, main_grad=main_grad,
        slices=tuple(math.prod(shape) for shape in shapes) if sliced else None,
        softcap=None if given.softcap is None else float(given.softcap),
        label_smoothing=float(given.label_smoothing), z_loss=float(given.z_loss),
        stats=given.stats, entropy=given.entropy,
    )  # fmt: skip
    weight, bias = given.weight, given.bias
    inputs = LossInputs(
        hidden.reshape(-1, hidden.shape[-1]),
        weight if weight.stride(-1) == 1 or weight.numel() == 0 else weight.contiguous(),
        bias if bias is None else bias.contiguous(),
        logit_scale,
        labels,
        class_weight,
    )
    return _Call(inputs, options, token_weight, divided, targets.shape, dim, shapes if dim else [])


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


def _plan_of(given: Arguments, shard: VocabShard, main_grad: bool) -> Plan:
    hidden, weight, bias, scale = given.hidden, given.weight, given.bias, given.logit_scale
    fixed_weights = given.token_weight is None or not given.token_weight.requires_grad
    keeps = not (given.softcap is not None and given.label_smoothing) and not given.entropy
    check_choice(hidden.dtype, given.reduction, given.memory_budget, given.method, main_grad, keeps, fixed_weights)
    scale_grad = isinstance(scale, torch.Tensor) and scale.requires_grad
    request = plan_request(
        given.targets.numel(), hidden.shape[-1], shard.vocab_size, hidden.dtype,
        ranks=1 if shard.group is None else shard.group.size(), device=hidden.device, reduction=given.reduction,
        memory_budget=given.memory_budget, method=given.method, hidden_grad=hidden.requires_grad or scale_grad,
        weight_grad=weight.requires_grad, bias_grad=bias is not None and bias.requires_grad,
        recorded=torch.is_grad_enabled(), main_grad=main_grad, sequence_parallel=shard.sequence_parallel,
        keeps=keeps, fixed_weights=fixed_weights,
        tile_bytes=8 + 4 * bool(given.label_smoothing) + 4 * (given.stats or given.entropy) + 4 * given.stats,
    )  # fmt: skip
    return make_plan(*request)
