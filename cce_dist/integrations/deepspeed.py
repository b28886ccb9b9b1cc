"""The loss inside DeepSpeed: ZeRO 0 to 3, AutoTP, an own ``mpu``, Ulysses' sequence parallelism.

``prepare`` is the one call. The loss then runs inside the forward of the head's own module: there ZeRO-3's hooks
gather the weight, do so again in backward, and see its gradient once a micro-batch.
"""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from cce_dist.functional import linear_cross_entropy

from .checkpoint import whole_state_dict
from .heads import Head, find_head, mark_shards, shard_head, whole_shape
from .pipeline import PipelineHead, PipelineLoss, with_weight
from .sequence import SequenceParallel, vocab_parallel_linear_cross_entropy

__all__ = [
    "LossPath",
    "PipelineHead",
    "PipelineLoss",
    "TensorParallelUnit",
    "head_loss",
    "mark_shards",
    "prepare",
    "shard_head",
    "vocab_parallel_linear_cross_entropy",
    "whole_state_dict",
    "with_weight",
]

_log = logging.getLogger(__name__)
# what prepare binds: the others are the layout's, or a call's
_OPTIONS = frozenset(inspect.signature(linear_cross_entropy).parameters) - {
    "hidden", "weight", "targets", "bias", "shard", "reduction", "denominator", "token_weight", "return_stats",
}  # fmt: skip


@dataclass(frozen=True)
class LossPath:
    """Which way the loss takes, as :func:`prepare` reports it.

    ``stage`` is ZeRO's; None before ``deepspeed.initialize``, which may still shard the head.
    ``sequence_parallel`` is the size of Ulysses' group. ``entry`` is what asks the head for its loss.
    """

    head: Head
    stage: int | None
    sequence_parallel: int
    entry: str

    def __str__(self) -> str:
        head, shard = self.head, self.head.shard
        vocab_size = whole_shape(head.module.weight)[0] if shard is None else shard.vocab_size  # type: ignore[arg-type]
        where = "all"
        if shard is not None:
            assert shard.group is not None
            ranks = dist.get_process_group_ranks(shard.group)
            where = f"rows {shard.start}:{shard.stop} on this of the tensor-parallel ranks {ranks},"
        return (
            f"{self.entry} computes the loss in {head.name}, {head.layout} ({where} of {vocab_size} classes"
            + (f", tied to {head.tied_to})" if head.tied_to else ")")
            + ("; before deepspeed.initialize" if self.stage is None else f"; ZeRO stage {self.stage}")
            + (f"; sequence parallelism of {self.sequence_parallel}" if self.sequence_parallel > 1 else "")
        )


def prepare(model: Any, *, head: str | nn.Module | None = None, **options: Any) -> LossPath:
    """Makes a model train without logits under DeepSpeed, and reports the path that the loss takes.

    A model of Hugging Face's keeps its interface: in training, with ``labels`` (shifted here) or ``shift_labels`` (as
    they are), its output's ``loss`` is the fused one and its ``logits`` are an empty tensor [..., 0]; a
    ``num_items_in_batch`` divides the sum of the tokens' losses, else it is their mean. Without labels, and in eval
    mode, it is as it was. Another model calls :func:`head_loss` in its forward.

    Args:
        model: what ``deepspeed.initialize`` returned; or the model itself, before it, where something else (as
            Hugging Face's Trainer) makes the engine. Under sequence parallelism the engine.
        head: the linear layer that makes the logits, or its name; else what ``get_output_embeddings`` says. It may
            be whole, AutoTP's (``"vocab_parallel_lm_head"`` or not), or sharded by :func:`shard_head`.
        options: of :func:`cce_dist.linear_cross_entropy`, those that are no token's: ``ignore_index``,
            ``memory_budget``, ``label_smoothing`` and so on.

    Raises:
        ValueError: no head, or one whose rows are not known; tied embeddings that were sharded apart; a data-parallel
            group that holds ranks of the tensor-parallel one (no ``mpu``); a pipeline's engine; stage 0 in fp16,
            where DeepSpeed loses the loss scale; stage 3 under sequence parallelism with
            ``"reduce_scatter": false``; a model whose labels are no causal language model's, or whose logits are
            scaled or capped.
        TypeError: an option that does not exist, a head with more in its forward than a linear layer.
        RuntimeError: in the first forward, a model that changes its logits, or takes its loss otherwise.

    Warns where DeepSpeed itself clips by a wrong norm: stage 0 in 16 bits with a sharded model.
    """
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(f"unknown options {sorted(unknown)}; prepare takes {sorted(_OPTIONS)}")
    engine = model if hasattr(model, "zero_optimization_stage") and hasattr(model, "module") else None
    if engine is not None:
        model = engine.module
    elif not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module or DeepSpeed's engine, got {type(model).__name__}")
    if hasattr(engine if engine is not None else model, "train_batch") or type(model).__name__ == "PipelineModule":
        raise ValueError("model is a pipeline, whose loss_fn computes the loss: pass it PipelineLoss() instead")
    found = find_head(model, head)
    mark_shards(model)
    stage, sequence = None, None
    if engine is not None:
        stage = engine.zero_optimization_stage()
        sequence = _sequence_parallel(engine)
        _check_groups(found)
        if stage == 0 and engine.fp16_enabled() and engine.loss_scale() != 1:
            raise ValueError(
                "DeepSpeed's stage 0 in fp16 divides gradients by a loss scale that its backward has not multiplied "
                'by: use stage 1 or above, bf16, or "loss_scale": 1'
            )
        if stage == 0 and found.shard is not None and (engine.bfloat16_enabled() or engine.fp16_enabled()):
            warnings.warn(
                "DeepSpeed's stage 0 in 16 bits takes the norm of the first tensor-parallel rank's gradients alone, "
                'and clips by it: use stage 1, or "gradient_clipping": 0',
                stacklevel=2,
            )
    current = model.__dict__.get("forward")
    if isinstance(current, _ModelForward):
        # a second call, as of the engine after the model: its options count
        current.options, current.sequence, current.head = options, sequence, head
        entry = current.entry
    elif hasattr(type(model), "loss_function"):
        _check_causal(model)
        model.forward = _ModelForward(model, options, sequence, head)
        entry = model.forward.entry
    else:
        forward = _head_forward(found.module)
        forward.options, forward.sequence = options, sequence
        entry = "head_loss"
    path = LossPath(found, stage, 1 if sequence is None else sequence.group.size(), entry)
    _log.info("%s", path)
    return path


def head_loss(
    head: nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    reduction: str = "mean",
    denominator: float | torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """The loss of a head, in the forward of a model that DeepSpeed trains. It calls the head's module, so that
    ZeRO-3's hooks gather its weight for forward and for backward.

    Args:
        head: as in :func:`prepare`; this rank's rows are known from the module.
        hidden: [..., D]. Equal on all tensor-parallel ranks, this rank's slice under Ulysses.
        targets: [...] int64, those of ``hidden``.
        reduction, denominator, options: see :func:`cce_dist.linear_cross_entropy`. Under Ulysses, after ``prepare``
            of the engine, ``"mean"`` and ``"sum"`` are over the whole sequence.

    Returns fp32, [] or [...]; raises what :func:`prepare` and :func:`cce_dist.linear_cross_entropy` raise.
    """
    forward = _head_forward(head)
    forward.request = _Request(targets, reduction, denominator, options)
    try:
        return head(hidden)
    finally:
        forward.request = None


@dataclass
class _Request:
    """A call of the head that asks for the loss of ``targets``, [...], instead of logits."""

    targets: torch.Tensor
    reduction: str
    denominator: float | torch.Tensor | None
    options: dict[str, Any]
    # for a model that asks by its loss_function
    loss: torch.Tensor | None = None
    placeholder: torch.Tensor | None = None
    asked: bool = False

    def __call__(self, logits: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The model's ``loss_function``."""
        if logits is not self.placeholder or self.loss is None:
            raise RuntimeError(
                "the model changes its logits between head and loss_function (a softcap, a scale, a slice): the loss "
                "without logits would be another; call head_loss(head, hidden, targets) in a forward of your own"
            )
        self.asked = True
        return self.loss


class _HeadForward:
    """``forward`` of a head: its logits, or, where a request waits, the loss. An object, not a closure, so that a
    copy of the model has one of its own."""

    def __init__(self, head: nn.Module) -> None:
        self.head, self.logits = head, head.forward
        self.options: dict[str, Any] = {}
        self.sequence: SequenceParallel | None = None
        self.request: _Request | None = None
        self.found: Head | None = None
        self.replaces_output = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request, head = self.request, self.head
        if request is None:
            return self.logits(*args, **kwargs)
        if self.found is None:
            found = find_head(head, head)
            _check_groups(found)
            if self.sequence is None and _sequence_size() > 1:
                raise ValueError(
                    "how gradients are combined under sequence parallelism depends on the engine: call "
                    "prepare(engine) after deepspeed.initialize"
                )
            self.found = found
        hidden: torch.Tensor = args[0] if args else kwargs["input"]
        options = {**self.options, **request.options, "bias": head.bias, "shard": self.found.shard}
        loss = linear_cross_entropy if self.sequence is None else self.sequence.loss
        weight: Any = head.weight
        return loss(
            hidden, weight, request.targets, reduction=request.reduction, denominator=request.denominator, **options
        )


def _head_forward(head: nn.Module) -> _HeadForward:
    forward = head.__dict__.get("forward")
    if not isinstance(forward, _HeadForward):
        forward = head.forward = _HeadForward(head)
    return forward


def _take_loss(head: nn.Module, inputs: Any, output: Any) -> Any:
    """A hook of the head's forward, behind ZeRO-3's: keeps the loss as these have wrapped it, and gives the model an
    empty tensor in place of logits."""
    request = head.__dict__["forward"].request
    if request is None:
        return output
    request.loss, request.placeholder = output, output.detach().new_empty(*request.targets.shape, 0)
    return request.placeholder


class _ModelForward:
    """``forward`` of a model of Hugging Face's: its own, where head and ``loss_function`` give the fused loss."""

    entry = "the model's forward"

    def __init__(
        self,
        model: nn.Module,
        options: dict[str, Any],
        sequence: SequenceParallel | None,
        head: str | nn.Module | None,
    ) -> None:
        self.model, self.original, self.options = model, model.forward, options
        self.sequence, self.head = sequence, head
        self.known: nn.Module | None = None
        # Trainer and generate look at the names of the arguments
        self.__signature__ = inspect.signature(model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(self.__signature__.bind_partial(*args, **kwargs).arguments)
        given |= given.get("kwargs", {})
        targets, labels = given.get("shift_labels"), given.get("labels")
        if not self.model.training or (targets is None and labels is None):
            return self.original(*args, **kwargs)
        if targets is None:
            assert labels is not None
            targets = F.pad(labels, (0, 1), value=self.options.get("ignore_index", -100))[..., 1:]
        elif labels is None:
            # the model asks for a loss where there are labels only
            kwargs["labels"] = targets
        forward = self._head()
        request = _Request(targets, "mean", given.get("num_items_in_batch"), {})
        model: Any = self.model
        before = model.loss_function
        forward.request = model.loss_function = request
        try:
            output = self.original(*args, **kwargs)
        finally:
            forward.request, model.loss_function = None, before
        if not request.asked:
            raise RuntimeError(
                f"model: {type(model).__name__}'s forward did not take its loss from loss_function; call "
                "head_loss(head, hidden, targets) in a forward of your own"
            )
        return output

    def _head(self) -> _HeadForward:
        model: Any = self.model
        module = model.get_output_embeddings() if self.head is None or isinstance(self.head, str) else self.head
        if isinstance(self.head, str):
            module = model.get_submodule(self.head)
        # looked up in each call: AutoTP replaces it in deepspeed.initialize
        if module is not self.known:
            find_head(model, self.head)
            self.known = module
        forward = _head_forward(module)
        if not forward.replaces_output:
            # hooks run in the order they came, and ZeRO-3's are there by the first forward
            module.register_forward_hook(_take_loss)
            forward.replaces_output = True
        forward.options, forward.sequence = self.options, self.sequence
        return forward


def _check_causal(model: Any) -> None:
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or getattr(model, "loss_type", None) == "ForMaskedLM":
        raise ValueError(
            f"model: {name} is no causal language model, whose labels are shifted by one; call head_loss(head, "
            "hidden, targets) in a forward of your own"
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for option, neutral in (("final_logit_softcapping", None), ("logit_scale", 1.0), ("logits_scaling", 1.0)):
        value = getattr(text, option, neutral)
        if value not in (neutral, None):
            raise ValueError(
                f"model: {name} changes its logits by {option}={value}, and the loss without logits would be another"
            )


def _groups() -> Any:
    """DeepSpeed's process groups, where it has been imported and has some."""
    groups = sys.modules.get("deepspeed.utils.groups")
    return groups if groups is not None and dist.is_available() and dist.is_initialized() else None


def _sequence_size() -> int:
    groups = _groups()
    if groups is None or groups.mpu is None or not hasattr(groups.mpu, "get_sequence_parallel_world_size"):
        return 1
    return int(groups.mpu.get_sequence_parallel_world_size())


def _sequence_parallel(engine: Any) -> SequenceParallel | None:
    if _sequence_size() == 1:
        return None
    averages = engine.zero_optimization_stage() >= 3
    if averages and not engine.zero_reduce_scatter():
        raise ValueError(
            '"reduce_scatter": false at stage 3 adds up some gradients over the sequence-parallel ranks and averages '
            "others: leave it true"
        )
    return SequenceParallel(_groups().mpu.get_sequence_parallel_group(), averages)


def _check_groups(head: Head) -> None:
    """``ValueError`` where the ranks that average gradients, and whose weights were made equal, hold different rows.
    The same on every rank of the group."""
    groups = _groups()
    if head.shard is None or groups is None:
        return
    assert head.shard.group is not None
    data = groups._get_sequence_data_parallel_group()
    if data is None:
        return
    shared = set(dist.get_process_group_ranks(head.shard.group)) & set(dist.get_process_group_ranks(data))
    if len(shared) > 1:
        raise ValueError(
            f"the ranks {sorted(shared)} hold different rows of {head.name or 'the head'}, but DeepSpeed averages "
            "gradients over them, and has given them the first one's weights: build the model again and pass "
            "deepspeed.initialize(..., mpu=TensorParallelUnit(tp_size))"
        )


class TensorParallelUnit:
    """What ``deepspeed.initialize(mpu=...)`` needs to know of a tensor-parallel layout of one's own: ``size``
    neighbouring ranks share a model, ranks of the same place in them are replicas. Made on every rank, after
    ``torch.distributed`` is initialised.

    Raises ``ValueError`` for a ``size`` that does not divide the count of ranks.
    """

    def __init__(self, size: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        if size < 1 or world % size:
            raise ValueError(f"size must divide the {world} ranks, got {size}")
        for start in range(0, world, size):
            members = list(range(start, start + size))
            group = dist.new_group(members)
            if rank in members:
                self._tensor = group
        for place in range(size):
            members = list(range(place, world, size))
            group = dist.new_group(members)
            if rank in members:
                self._data = group

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._tensor

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._tensor)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._tensor)

    # universal checkpoints ask by these names
    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data)
