"""The head as a style of ``torch.distributed.tensor.parallel.parallelize_module``."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from .functional import linear_cross_entropy, linear_log_probs


class VocabParallelHead(ParallelStyle):
    """A language model's head, an ``nn.Linear`` [vocab_size, D], with its rows spread over a mesh: beside
    ``ColwiseParallel``, ``RowwiseParallel`` and ``SequenceParallel`` in a plan of ``parallelize_module``.

    ``weight`` and ``bias`` become DTensors with ``Shard(0)``. The module keeps its forward, for generation, with
    gathered logits, and gains ``loss(hidden, targets, **options)`` and ``log_probs``, without logits:
    :func:`linear_cross_entropy` and :func:`linear_log_probs`.

    Args:
        input_layouts: what a plain ``hidden`` is: ``Replicate()`` (where None), the same on all ranks of the mesh, or
            ``Shard(dim)``, this rank's slice of the sequence. A DTensor says so itself.
        output_layouts: of forward's logits; ``Replicate()`` where None.
        use_local_output: whether the logits are a plain tensor, this rank's part of that layout.

    The vocabulary may have any size. A weight that is sharded so already is kept as it is: of tied embeddings,
    parallelize the embedding by ``RowwiseParallel(input_layouts=Replicate())`` and then tie them (again):
    ``model.lm_head.weight = model.embed.weight``; ``parallelize_module`` shards them apart.

    Under ``fully_shard`` the loss belongs inside the forward of the module that gathers the weight. Where that is the
    head itself, ``torch.distributed.fsdp.register_fsdp_forward_method(model.lm_head, "loss")`` makes it one.

    Raises ``TypeError`` for a module that is no ``nn.Linear``, ``ValueError`` for a mesh of more dimensions than one
    and for a weight that is sharded in another way.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = (input_layouts or Replicate(),)
        self.output_layouts = (output_layouts or Replicate(),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise TypeError(f"VocabParallelHead parallelizes an nn.Linear, got {type(module).__name__}")
        if device_mesh.ndim != 1:
            raise ValueError(f"VocabParallelHead needs a mesh of one dimension, got {device_mesh}: pass mesh['tp']")
        self._partition(module, device_mesh)
        module.register_forward_pre_hook(functools.partial(self._prepare_input, device_mesh))
        module.register_forward_hook(self._prepare_output)
        # as fully_shard does: in a plan the module itself must stay
        cls = type(module)
        module.__class__ = type(f"VocabParallel{cls.__name__}", (_WithLoss, cls), {"__doc__": cls.__doc__})
        module.input_layouts = self.input_layouts  # type: ignore[assignment]
        return module

    def _partition(self, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                if parameter.device_mesh != mesh or parameter.placements != (Shard(0),):
                    raise ValueError(
                        f"{name} is a DTensor with the placements {parameter.placements} on {parameter.device_mesh}, "
                        f"expected Shard(0) on {mesh}"
                    )
                continue
            rows = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(rows, requires_grad=parameter.requires_grad))

    def _prepare_input(self, mesh: DeviceMesh, module: nn.Module, inputs: tuple[Any, ...]) -> DTensor:
        hidden = inputs[0]
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, mesh, self.input_layouts, run_check=False)
        return hidden.redistribute(placements=(Replicate(),), async_op=True)

    def _prepare_output(self, module: nn.Module, inputs: Any, logits: DTensor) -> torch.Tensor:
        logits = logits.redistribute(placements=self.output_layouts, async_op=True)
        return logits.to_local() if self.use_local_output else logits

    def __repr__(self) -> str:
        return (
            f"VocabParallelHead(input_layouts={self.input_layouts}, output_layouts={self.output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class _WithLoss(nn.Linear):
    """What a parallelized head gains."""

    input_layouts: tuple[Placement]

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor, **options: Any) -> Any:
        """:func:`linear_cross_entropy` of ``hidden`` [..., D], a DTensor or laid out as the style's
        ``input_layouts`` say, and ``targets`` [...], whole on all ranks of the mesh."""
        return linear_cross_entropy(self._placed(hidden, targets), self.weight, targets, bias=self.bias, **options)

    def log_probs(self, hidden: torch.Tensor, targets: torch.Tensor, **options: Any) -> Any:
        """:func:`linear_log_probs`, likewise."""
        return linear_log_probs(self._placed(hidden, targets), self.weight, targets, bias=self.bias, **options)

    def _placed(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        (layout,) = self.input_layouts
        if isinstance(layout, Shard) and isinstance(hidden, torch.Tensor) and not isinstance(hidden, DTensor):
            assert isinstance(self.weight, DTensor)
            # the slices may be uneven: the whole's shape is that of the targets
            whole = torch.empty(*targets.shape, hidden.shape[-1], device="meta")
            return DTensor.from_local(
                hidden, self.weight.device_mesh, (layout,), run_check=False, shape=whole.shape, stride=whole.stride()
            )
        return hidden
