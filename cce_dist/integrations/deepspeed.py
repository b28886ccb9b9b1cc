"""The loss inside DeepSpeed: ZeRO 0 to 3, AutoTP, an own ``mpu``, Ulysses' sequence parallelism.

``prepare`` is the one call. The loss then runs inside the forward of the head's own module: there ZeRO-3's hooks
gather the weight, do so again in backward, and see its gradient once a micro-batch.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.nn as nn

from .checkpoint import whole_state_dict
from .groups import TensorParallelUnit, check_groups, sequence_parallel
from .heads import Head, find_head, mark_shards, shard_head, whole_shape
from .loss import OPTIONS, HeadLoss, head_loss
from .model import find_model, patch_model
from .pipeline import PipelineHead, PipelineLoss, with_weight
from .sequence import vocab_parallel_linear_cross_entropy

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
            ``"reduce_scatter": false``; a model whose labels are no causal language model's.
        TypeError: an option that does not exist, a head with more in its forward than a linear layer.
        RuntimeError: in the first forward, a model that changes its logits otherwise than by a scale and a soft cap,
            or takes its loss otherwise.

    Warns where DeepSpeed itself clips by a wrong norm: stage 0 in 16 bits with a sharded model.
    """
    if unknown := options.keys() - OPTIONS:
        raise TypeError(f"unknown options {sorted(unknown)}; prepare takes {sorted(OPTIONS)}")
    engine = model if hasattr(model, "zero_optimization_stage") and hasattr(model, "module") else None
    if engine is not None:
        model = engine.module
    elif not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module or DeepSpeed's engine, got {type(model).__name__}")
    if hasattr(engine if engine is not None else model, "train_batch") or type(model).__name__ == "PipelineModule":
        raise ValueError("model is a pipeline, whose loss_fn computes the loss: pass it PipelineLoss() instead")
    causal, entry = find_model(model), "head_loss"
    model = model if causal is None else causal
    found = find_head(model, head)
    mark_shards(model)
    stage, sequence = None, None
    if engine is not None:
        stage = engine.zero_optimization_stage()
        sequence = sequence_parallel(engine)
        check_groups(found)
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
    loss = HeadLoss(options, sequence)
    if causal is None:
        found.module.cce_loss = loss  # type: ignore[assignment]
    else:
        # a second call, as of the engine after the model: its options count
        patch_model(causal, head, loss)
        entry = "the model's forward"
    path = LossPath(found, stage, 1 if sequence is None else sequence.group.size(), entry)
    _log.info("%s", path)
    return path
