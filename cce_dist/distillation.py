"""Knowledge distillation between two heads: validation and dispatch."""

from __future__ import annotations

import math
import numbers

import torch

from .divergence import SPARE, UNCOUNTED, DivergenceOptions, Divergences
from .kernels.rows import ROW_GROUP
from .kernels.runtime import round_up
from .parallel import dtensor
from .parallel.agreement import agree
from .parallel.shard import VocabShard
from .planner import DTYPES, REDUCTIONS

DIVERGENCES = ("forward", "reverse", "jensen_shannon")
# bytes of the panels where no budget is given
DEFAULT_PANELS = 512 << 20
# the rows of a panel from the most to the fewest, and the columns at least and at most: fewer leave multiprocessors
# idle, more gain nothing
PANEL_ROWS = (8192, 4096, 2048, 1024)
PANEL_COLUMNS = (512, 8192)

_Head = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def linear_kl_div(
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_hidden: torch.Tensor | None = None,
    teacher_weight: torch.Tensor | None = None,
    *,
    top_k: tuple[torch.Tensor, torch.Tensor] | None = None,
    mask: torch.Tensor | None = None,
    divergence: str = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
    student_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    reduction: str = "mean",
    denominator: float | torch.Tensor | None = None,
    shard: VocabShard | None = None,
    memory_budget: int | str | None = None,
) -> torch.Tensor:
    """Divergence of a student's distribution over the vocabulary from a teacher's, neither's logits held whole.

    A head's logits are ``x = hidden @ weight.T + bias``, then ``softcap tanh(x / softcap)``, then
    ``x / temperature``.
    With ``q`` the student's softmax and ``p`` the teacher's, a token's loss is

    - ``"forward"``: ``KL(p || q) = sum p (log p - log q)`` (Hinton et al., 2015),
    - ``"reverse"``: ``KL(q || p)`` (Gu et al., 2024),
    - ``"jensen_shannon"``: ``beta KL(p || m) + (1 - beta) KL(q || m)`` with ``m = beta p + (1 - beta) q`` (Agarwal et
      al., 2024).

    The usual factor ``temperature**2`` on the loss, for gradients that keep their size, is the caller's.

    Args:
        student_hidden: ``[..., D]``, float32, bfloat16, float16, or float64 on CPUs. Equal on all ranks of
            ``shard.group``.
        student_weight: ``[V, D]``, student_hidden's dtype: the classifier, or this rank's rows of it where ``shard``
            says so.
        teacher_hidden: ``[..., D']``, of the student's leading shape. The teacher may have another width and dtype
            than the student, though float64 for both or neither. Nothing of it may require gradients.
        teacher_weight: ``[V, D']``, teacher_hidden's dtype: the same rows of the same vocabulary.
        top_k: in place of the teacher's head ``(ids [..., K], probabilities [..., K])``, int64 (or int32) class ids
            of the whole vocabulary and the teacher's probabilities, whole on every rank. The loss is
            ``sum_k p_k (log p_k - log q[id_k])``, with the probabilities as they are given, which need not sum to 1;
            what has the probability 0 adds nothing, ids may repeat. For ``"forward"`` alone.
        mask: ``[...]``, bool: the tokens that count, None for all. The others are not computed and add nothing to the
            loss and to any gradient, even where their hidden states are NaN.
        beta: the teacher's share of ``m``, between 0 and 1.
        temperature: above 0.
        student_bias, teacher_bias: ``[V]``, their hidden's dtype, sharded as the weights are.
        student_softcap, teacher_softcap: above 0, or None for none.
        reduction: ``"mean"`` over the tokens that count (0 where there are none), ``"sum"``, or ``"none"``.
        denominator: a number or 0-d tensor that replaces the count of tokens in ``"mean"``.
        shard: which rows of the vocabulary the weights hold, and the group whose ranks hold the others. The ranks'
            upstream gradients must be equal, as the losses are.
        memory_budget: bytes of workspace, beyond the inputs and their gradients, that a rank may use; ``"min"`` for
            as little as there can be. None: 512 MiB and a copy of the hidden states.

    Returns:
        fp32 (fp64 for fp64 inputs): ``[]``, or the leading shape for ``"none"``. The same on every rank. In backward
        ``student_hidden`` gets its whole gradient on every rank, ``student_weight`` and ``student_bias`` that of
        their rows, each accumulated in fp32 and rounded once to its dtype. Under autocast the inputs are cast as
        ``torch.nn.functional.linear`` casts them.

    Raises:
        ValueError: shapes that do not fit, a teacher that requires gradients, both ``top_k`` and a teacher's head or
            neither, ``top_k`` with another divergence than ``"forward"``, an unknown divergence or reduction, numbers
            out of their range, a budget that nothing fits, a shard that is not the weights' or is sequence parallel,
            ranks that disagree. On every rank of the group, before any work starts; where the group works on GPUs, in
            the first call with a shard and these shapes only.
        TypeError: arguments of the wrong type or dtype, DTensors, likewise.
        IndexError: an id of ``top_k`` outside the vocabulary, on CPUs. On GPUs that token's loss is NaN.
    """
    given = shard if isinstance(shard, VocabShard) else None
    error: Exception | None = None
    student: _Head = (student_hidden, student_weight, student_bias)
    teacher: _Head = (teacher_hidden, teacher_weight, teacher_bias)
    try:
        _validate_choices(divergence, beta, temperature, student_softcap, teacher_softcap, reduction, memory_budget)
        _validate_teacher(teacher, top_k, divergence)
        student, teacher = _autocast("student", student), _autocast("teacher", teacher)
        hidden, weight, bias = _validate_head("student", student)
        if teacher_hidden is not None:
            _validate_pair(hidden, weight, *_validate_head("teacher", teacher)[:2])
        _validate_tokens(hidden, top_k, mask)
        if denominator is not None:
            _validate_denominator(denominator, reduction, hidden.device)
        shard = _validate_shard(weight, shard)
        _validate_ids(top_k, mask, shard)
        rows, columns = _panel_shape(hidden, weight, teacher[0], top_k, memory_budget)
    except (ValueError, TypeError, IndexError) as problem:
        error = problem
    same = {} if error is not None else {
        "the shape of student_hidden": tuple(hidden.shape),
        "the dtype of student_hidden": str(hidden.dtype),
        "requires_grad of student_hidden": hidden.requires_grad,
        "the shape of teacher_hidden": None if teacher[0] is None else tuple(teacher[0].shape),
        "the shape of top_k": None if top_k is None else tuple(top_k[0].shape),
        "the presence of mask": mask is not None,
        "the presence of biases": (bias is not None, teacher_bias is not None),
        "divergence": (divergence, beta),
        "temperature": temperature,
        "softcaps": (student_softcap, teacher_softcap),
        "whether reduction is none": reduction == "none",
        "whether gradients are recorded": torch.is_grad_enabled(),
    }  # fmt: skip
    device = student_hidden.device if isinstance(student_hidden, torch.Tensor) else torch.device("cpu")
    agree(given, same, device, error)
    assert isinstance(shard, VocabShard)

    shape, num_tokens = hidden.shape[:-1], math.prod(hidden.shape[:-1])
    counted = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask
    labels = torch.where(counted.reshape(-1), 0, UNCOUNTED)
    options = DivergenceOptions(
        shard=shard, kind=divergence if top_k is None else "top_k", beta=float(beta), temperature=float(temperature),
        softcaps=(student_softcap, teacher_softcap), rows=rows, columns=columns,
    )  # fmt: skip
    top_ids, top_probs = (None, None) if top_k is None else (x.reshape(num_tokens, -1) for x in top_k)
    losses = Divergences.apply(
        *_matrices((hidden, weight, bias)), *_matrices(teacher), top_ids, top_probs, labels, options
    )
    if reduction == "none":
        return losses.view(shape)
    total = losses.sum(dtype=torch.float64)
    if reduction == "mean":
        count = counted.sum()
        divisor: float | torch.Tensor = count
        if denominator is not None:
            divisor = denominator if isinstance(denominator, torch.Tensor) else float(denominator)
        # without a token the loss is 0, whatever the denominator
        total = total / torch.where(count == 0, torch.ones_like(total), divisor)
    return total.to(losses.dtype)


def _matrices(head: _Head) -> _Head:
    """A head as the kernels take it: tokens in one dimension, rows that are contiguous."""
    hidden, weight, bias = head
    if hidden is None or weight is None:
        return head
    rows = weight if weight.stride(-1) == 1 or weight.numel() == 0 else weight.contiguous()
    return hidden.reshape(-1, hidden.shape[-1]), rows, None if bias is None else bias.contiguous()


def _panel_shape(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: torch.Tensor | None,
    top_k: tuple[torch.Tensor, torch.Tensor] | None,
    memory_budget: int | str | None,
) -> tuple[int, int]:
    """(rows, columns) of a panel that the budget has room for."""
    n = max(ROW_GROUP, round_up(math.prod(hidden.shape[:-1]), ROW_GROUP))
    wide = torch.promote_types(hidden.dtype, torch.float32).itemsize
    narrow = hidden.dtype.itemsize
    # the packed rows, the gradient of the student's, and a few numbers a row
    token = hidden.shape[-1] * (narrow + wide) + 64
    token += 0 if teacher is None else teacher.shape[-1] * teacher.dtype.itemsize
    token += 0 if top_k is None else top_k[0].shape[-1] * 48
    element = wide * (1 if teacher is None else 2) + (narrow if narrow < wide else 0)
    least, most = PANEL_COLUMNS

    def needed(rows: int, columns: int) -> int:
        # a 16-bit weight's gradient grows in full precision where the tokens come in several panels
        sums = columns * hidden.shape[-1] * wide if rows < n and narrow < wide else 0
        return n * token + rows * (columns + SPARE) * element + sums

    smallest = min(n, PANEL_ROWS[-1]), least
    if memory_budget == "min":
        return smallest
    budget = memory_budget if isinstance(memory_budget, int) else n * token + DEFAULT_PANELS
    for rows in PANEL_ROWS:
        rows = min(n, rows)
        for columns in range(min(most, round_up(max(1, len(weight)), least)), 0, -least):
            if needed(rows, columns) <= budget:
                return rows, columns
    raise ValueError(
        f"memory_budget: nothing fits {budget} bytes of workspace; {needed(*smallest)} are needed at least"
    )


def _validate_choices(
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
    for name, number in (
        ("beta", beta), ("temperature", temperature),
        ("student_softcap", student_softcap), ("teacher_softcap", teacher_softcap),
    ):  # fmt: skip
        if number is None and name.endswith("softcap"):
            continue
        if isinstance(number, bool) or not isinstance(number, numbers.Real):
            raise TypeError(f"{name} must be a number, got {type(number).__name__}")
        if not 0 < number < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, got {number}")
    if not beta < 1:
        raise ValueError(
            f"beta must lie between 0 and 1, got {beta}. Towards its ends the divergence vanishes: for what is left "
            'of it there use divergence "forward" or "reverse"'
        )
    if isinstance(memory_budget, bool) or not (memory_budget is None or isinstance(memory_budget, (int, str))):
        raise TypeError(f'memory_budget must be bytes, "min" or None, got {type(memory_budget).__name__}')
    if isinstance(memory_budget, str) and memory_budget != "min":
        raise ValueError(f'memory_budget must be bytes, "min" or None, got {memory_budget!r}')
    if isinstance(memory_budget, int) and memory_budget < 0:
        raise ValueError(f"memory_budget must not be negative, got {memory_budget}")


def _validate_teacher(teacher: _Head, top_k: tuple[torch.Tensor, torch.Tensor] | None, divergence: str) -> None:
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


def _autocast(whose: str, head: _Head) -> _Head:
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


def _validate_head(whose: str, head: _Head) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
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


def _validate_pair(
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


def _validate_tokens(
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


def _validate_ids(
    top_k: tuple[torch.Tensor, torch.Tensor] | None, mask: torch.Tensor | None, shard: VocabShard
) -> None:
    if top_k is None or top_k[0].device.type != "cpu":
        return
    counted = top_k[0] if mask is None else top_k[0][mask]
    outside = counted[(counted < 0) | (counted >= shard.vocab_size)]
    if len(outside):
        raise IndexError(f"the ids of top_k must lie in [0, {shard.vocab_size}), got {int(outside[0])}")


def _validate_denominator(denominator: float | torch.Tensor, reduction: str, device: torch.device) -> None:
    if reduction != "mean":
        raise ValueError(f"denominator takes part in reduction 'mean' alone, got reduction {reduction!r}")
    if dtensor.any_dtensor(denominator):
        raise TypeError("denominator is a DTensor; pass denominator.full_tensor()")
    if isinstance(denominator, torch.Tensor):
        if denominator.dim() != 0:
            raise ValueError(f"denominator must be a number or a 0-d tensor, got shape {tuple(denominator.shape)}")
        if denominator.device != device and denominator.device.type != "cpu":
            raise ValueError(
                f"denominator is on {denominator.device}, student_hidden on {device}: expected one device"
            )
    elif isinstance(denominator, bool) or not isinstance(denominator, numbers.Real):
        raise TypeError(f"denominator must be a number or a 0-d tensor, got {type(denominator).__name__}")
    elif not denominator > 0:
        raise ValueError(f"denominator must be above 0, got {denominator}")


def _validate_shard(weight: torch.Tensor, shard: VocabShard | None) -> VocabShard:
    if shard is None:
        if len(weight) == 0:
            raise ValueError(f"student_weight must hold at least one class, got {tuple(weight.shape)}")
        return VocabShard(0, len(weight), len(weight))
    if not isinstance(shard, VocabShard):
        raise TypeError(f"shard must be a VocabShard, got {type(shard).__name__}")
    if shard.sequence_parallel:
        raise ValueError(
            "shard is sequence_parallel, and linear_kl_div takes whole hidden states: gather the ranks' slices and "
            "pass a shard without it"
        )
    if len(weight) != shard.rows:
        whole = " (that is the whole vocabulary: pass this rank's rows)" if len(weight) == shard.vocab_size else ""
        raise ValueError(
            f"student_weight must hold the {shard.rows} rows {shard.start} to {shard.stop} of its shard, got "
            f"{len(weight)} rows{whole}"
        )
    return shard
