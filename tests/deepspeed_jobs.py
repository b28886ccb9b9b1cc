"""Training under DeepSpeed on each rank, beside the same training in one process: what the tests assert and the
tables of docs/deepspeed.md show.

The truth is one process in fp64 that sees all tokens, with whole logits. The yardstick is the same process in the
job's own dtype, and, where AutoTP has split the layers, the same job with DeepSpeed's own loss: a job may be off by
what they are off. 16-bit jobs keep their weights in fp32 and round them for each
step; so do both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tolerance import FACTOR, FACTOR_FP32, LOSS

from cce_dist.integrations import deepspeed as integration

if not all(importlib.util.find_spec(name) for name in ("deepspeed", "transformers")):
    # of the test file that imports this one. Found, not imported: only the ranks need them
    pytest.skip("needs the extra deepspeed", allow_module_level=True)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HIDDEN, LENGTH, BATCH, STEPS, RATE = 64, 16, 2, 3, 0.5
IGNORED = -100


@dataclasses.dataclass(frozen=True)
class Job:
    """``mode``: zero, autotp (its whole-logits head), autotp-vocab (its sharded one), mpu (shard_head) or ulysses.
    ``parallel``: the size of the tensor- or sequence-parallel group; the other ranks are data-parallel."""

    mode: str
    stage: int
    dtype: str = "fp32"
    tied: bool = False
    parallel: int = 1
    accumulate: int = 1
    clip: float = 0.0
    offload: bool = False
    vocab: int = 203
    init: str = "config"
    frozen: bool = False
    method: str | None = None

    def __str__(self) -> str:
        fields = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self)}
        return "-".join(str(v) if isinstance(v, str) else f"{k}{int(v)}" for k, (v, d) in fields.items() if v != d)


def all_jobs() -> list[Job]:
    """Every mode at every stage, in every dtype, untied and tied; two micro-batches a step, clipped, where DeepSpeed
    clips right."""
    modes = [
        ("zero", 1, ("fp32", "bf16", "fp16")), ("autotp", 2, ("fp32", "bf16")),
        ("autotp-vocab", 2, ("fp32", "bf16", "fp16")), ("autotp-vocab", 4, ("fp32", "bf16")),
        ("mpu", 2, ("fp32", "bf16", "fp16")), ("mpu", 4, ("fp32",)),
        ("ulysses", 2, ("fp32", "bf16", "fp16")), ("ulysses", 4, ("fp32", "bf16")),
    ]  # fmt: skip
    jobs = []
    for (mode, parallel, dtypes), stage in itertools.product(modes, range(4)):
        for dtype, tied in itertools.product(dtypes, (False, True)):
            if (stage, dtype) != (0, "fp16"):
                job = Job(mode, stage, dtype, tied, parallel, accumulate=2, clip=1.0)
                jobs.append(dataclasses.replace(job, clip=0.0) if wrong_norm(job) else job)
    return jobs


def wrong_norm(job: Job) -> bool:
    """Where DeepSpeed counts the first tensor-parallel rank's shards alone."""
    return job.stage == 0 and job.dtype != "fp32" and job.mode in ("autotp", "autotp-vocab", "mpu")


@dataclasses.dataclass
class Outcome:
    """What was trained: losses and norms of the steps, the first step's gradients, weights at the end; whole."""

    losses: list[float]
    norms: list[float | None]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


@functools.cache
def libraries() -> Any:
    """DeepSpeed, without the op that it would build for a minute and that training never uses."""
    # what a launcher would set
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    import deepspeed
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # it asks for fast fp16, which few CPUs have; torch computes it on all
    get_accelerator().is_fp16_supported = lambda: True
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def make_model(tied: bool, vocab: int, seed: int = 0) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=tied, max_position_embeddings=64, initializer_range=0.1,
        attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config).train()


def micro_batches(job: Job, replicas: int, step: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """(ids, labels), [BATCH, LENGTH], of each replica and micro-batch, with unequal counts of valid tokens."""
    generator = torch.Generator().manual_seed(100 + step)
    batches = []
    for replica in range(replicas):
        batches.append([])
        for micro in range(job.accumulate):
            ids = torch.randint(job.vocab, (BATCH, LENGTH), generator=generator)
            labels = ids.clone()
            labels[:, : 1 + (3 * replica + 5 * micro + step) % 7] = IGNORED
            labels[0, -3:] = IGNORED
            batches[-1].append((ids, labels))
    return batches


def valid(labels: torch.Tensor) -> int:
    return int((labels[:, 1:] != IGNORED).sum())


def single_process(job: Job, replicas: int, dtype: torch.dtype, masters: torch.dtype) -> Outcome:
    """The job in one process, by torch alone: ``dtype`` for the model, ``masters`` for weights and losses."""
    model = make_model(job.tied, job.vocab)
    model.lm_head.weight.requires_grad_(not job.frozen)
    # what the job's ranks start from
    model.to(DTYPES[job.dtype]).to(dtype)
    weights = {name: p.detach().to(masters, copy=True) for name, p in model.named_parameters()}
    outcome = Outcome([], [], {}, {})
    for step in range(STEPS):
        batches = [pair for replica in micro_batches(job, replicas, step) for pair in replica]
        count, total = sum(valid(labels) for _, labels in batches), 0.0
        for ids, labels in batches:
            logits = model(input_ids=ids).logits.to(torch.promote_types(dtype, torch.float32))
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
            )
            (loss / count).backward()
            total += loss.item()
        gradients = {n: p.grad.to(masters) for n, p in model.named_parameters() if p.grad is not None}
        norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
        factor = min(1.0, job.clip / (norm + 1e-6)) if job.clip else 1.0
        outcome.losses.append(total / count)
        outcome.norms.append(norm)
        if step == 0:
            outcome.gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.grad is not None:
                    weights[name] -= RATE * factor * gradients[name]
                    p.copy_(weights[name])
                    p.grad = None
    # rounded, as the model has them
    outcome.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return outcome


@contextlib.contextmanager
def clean_state() -> Iterator[None]:
    """DeepSpeed keeps its groups and modes in globals: each job of a process starts without any."""
    libraries()
    from deepspeed.runtime.tensor_parallel import init_utils
    from deepspeed.utils import groups
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    groups_before = set(dist.distributed_c10d._world.pg_map)
    try:
        yield
        # each keeps threads
        dist.barrier()
        for group in set(dist.distributed_c10d._world.pg_map) - groups_before:
            dist.destroy_process_group(group)
    finally:
        groups._release_process_group_references(None)
        init_utils._TP_MODEL_INIT_ARGS = None
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attention


def config_of(job: Job) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": job.accumulate,
        "gradient_clipping": job.clip,
        # buffers of a size to be poisoned, and several of them a step
        "zero_optimization": {"stage": job.stage, "reduce_bucket_size": 20000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
    }
    if job.stage == 3:
        # else such a small model would not be partitioned
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}
    if job.offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if job.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if job.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 10}
    if job.mode.startswith("autotp"):
        config["tensor_parallel"] = {
            "autotp_size": job.parallel,
            "vocab_parallel_lm_head": job.mode == "autotp-vocab",
        }
    return config


def make_engine(job: Job, device: torch.device, model: Any = None, prepare: str = "after", **config: Any) -> Any:
    """The engine of a job, prepared before or after ``deepspeed.initialize``, or not at all."""
    deepspeed = libraries()
    model = make_model(job.tied, job.vocab) if model is None else model
    model.lm_head.weight.requires_grad_(not job.frozen)
    mpu = None
    if job.mode == "mpu":
        mpu = integration.TensorParallelUnit(job.parallel)
        integration.shard_head(model, mpu.get_model_parallel_group())
    if job.mode == "ulysses":
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        deepspeed.init_distributed()
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model, core_attn_implementation="sdpa", sequence_parallel_size=job.parallel, micro_batch_size=BATCH
        )
    if job.init == "tp_model_init":
        deepspeed.init_distributed()
        model = deepspeed.tp_model_init(model, tp_size=job.parallel, dtype=DTYPES[job.dtype])
    options = {} if job.method is None else {"method": job.method}
    if prepare == "before":
        integration.prepare(model, **options)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = None if "optimizer" in config else torch.optim.SGD(parameters, lr=RATE)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=parameters if optimizer is None else None,
        config={**config_of(job), **config},
        mpu=mpu,
    )
    if prepare == "after":
        integration.prepare(engine, **options)
    return engine


def layout(job: Job) -> tuple[int, int, int]:
    """(replicas, this rank's replica, its place in the tensor- or sequence-parallel group)."""
    world, rank = dist.get_world_size(), dist.get_rank()
    return world // job.parallel, rank // job.parallel, rank % job.parallel


def run_step(job: Job, engine: Any, step: int, device: torch.device) -> float:
    """All micro-batches of a step, forward and backward, but for the last ``engine.step()``; the mean loss over all
    tokens."""
    replicas, replica, place = layout(job)
    everyones = micro_batches(job, replicas, step)
    count = sum(valid(labels) for micros in everyones for _, labels in micros)
    # DeepSpeed averages over replicas and micro-batches
    denominator = torch.tensor(count / (replicas * job.accumulate), device=device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for ids, labels in everyones[replica]:
        inputs = {"input_ids": ids, "labels": labels}
        if job.mode == "ulysses":
            shifted = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
            positions = torch.arange(LENGTH).expand(BATCH, -1)
            inputs = {"input_ids": ids, "position_ids": positions, "shift_labels": shifted}
            part = slice(place * LENGTH // job.parallel, (place + 1) * LENGTH // job.parallel)
            inputs = {name: tensor[:, part].contiguous() for name, tensor in inputs.items()}
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        loss = engine(**inputs, num_items_in_batch=denominator).loss
        engine.backward(loss)
        total += loss.detach()
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    dist.all_reduce(total)
    return total.item() / (dist.get_world_size() * job.accumulate)


def own_part(engine: Any, name: str, whole: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a whole parameter, once ZeRO has gathered its part."""
    module = engine.module.get_submodule(name.rpartition(".")[0])
    if hasattr(module, "shard"):
        return whole[module.shard.start : module.shard.start + module.shard.classes]
    if getattr(module, "mp_group", None) is None:
        return whole
    dim = 1 if "Allreduce" in type(module).__name__ else 0
    if dim == 1 and whole.dim() == 1:
        return whole
    sizes = getattr(module, "_partition_sizes", None)
    if sizes is None:
        size = whole.shape[dim] // module.tp_world_size
        sizes = [size] * module.tp_world_size
    return whole.split(list(sizes), dim)[module.tp_index]


def train(job: Job, device: torch.device, prepare: str = "after") -> tuple[Any, Outcome]:
    """The job on this rank; gradients and weights are this rank's tensor-parallel part."""
    deepspeed = libraries()
    from deepspeed.utils import safe_get_full_grad

    engine = make_engine(job, device, prepare=prepare)
    outcome = Outcome([], [], {}, {})
    for step in range(STEPS):
        outcome.losses.append(run_step(job, engine, step, device))
        if step == 0:
            scale = engine.optimizer.loss_scale if job.dtype == "fp16" else 1
            for name, parameter in engine.module.named_parameters():
                gradient = safe_get_full_grad(parameter) if parameter.requires_grad else None
                if gradient is not None:
                    outcome.gradients[name] = gradient.detach().double().cpu() / scale
        engine.step()
        norm = engine.get_global_grad_norm()
        outcome.norms.append(None if norm is None else float(norm))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=job.stage == 3):
        outcome.weights = {n: p.detach().double().cpu().clone() for n, p in engine.module.named_parameters()}
    return engine, outcome


def errors_of(job: Job, found: Outcome, truth: Outcome, engine: Any = None) -> dict[str, float]:
    """How far ``found`` is from the truth: losses (the largest, relative), gradients of the head, of all parameters
    and norms (relative), and weights in relation to how far they moved."""
    start = make_model(job.tied, job.vocab).to(DTYPES[job.dtype])
    moved = {name: truth.weights[name] - p.detach().double() for name, p in start.named_parameters()}

    def part(name: str, whole: torch.Tensor) -> torch.Tensor:
        return whole if engine is None else own_part(engine, name, whole)

    def off(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], by: dict[str, torch.Tensor]) -> float:
        assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
        error = torch.stack([(ours[n].double() - part(n, theirs[n])).norm() for n in ours]).norm()
        return float(error / torch.stack([part(n, by[n]).norm() for n in ours]).norm())

    head = "model.embed_tokens.weight" if job.tied or job.frozen else "lm_head.weight"
    norms = [abs(n - t) / t for n, t in zip(found.norms, truth.norms, strict=True) if n is not None]
    return {
        "loss": max(abs(a - b) / b for a, b in zip(found.losses, truth.losses, strict=True)),
        "head": off({head: found.gradients[head]}, *2 * [{head: truth.gradients[head]}]),
        "gradients": off(found.gradients, truth.gradients, truth.gradients),
        "norm": max(norms, default=0.0),
        "weights": off(found.weights, {n: w.double() for n, w in truth.weights.items()}, moved),
    }


@functools.cache
def truth_and_yardstick(job: Job, replicas: int) -> tuple[Outcome, dict[str, float]]:
    truth = single_process(job, replicas, torch.float64, torch.float64)
    yardstick = single_process(job, replicas, DTYPES[job.dtype], torch.float32)
    return truth, errors_of(job, yardstick, truth)


def assert_within(job: Job, errors: dict[str, float], yardstick: dict[str, float]) -> None:
    """A job is as near to the truth as the yardstick. Its losses, a few numbers that chance may favour, are within a
    rounding of the job's dtype; a norm is no further off than the gradients are."""
    factor = FACTOR_FP32 if job.dtype == "fp32" else FACTOR
    bounds = {name: factor * yardstick[name] for name in ("head", "gradients", "weights")}
    bounds["loss"] = max(LOSS, torch.finfo(DTYPES[job.dtype]).eps / 2)
    bounds["norm"] = factor * yardstick["gradients"]
    wrong = {name: (errors[name], bound) for name, bound in bounds.items() if not errors[name] <= bound}
    if wrong_norm(job):
        assert wrong.pop("norm", None), "DeepSpeed's norm is right here by now: clip, and warn no more"
    assert not wrong, f"{job}: (error, allowed) {wrong}"


def measure(job: Job, device: torch.device, prepare: str = "after") -> tuple[dict[str, float], dict[str, float]]:
    """(this job's errors on the rank where they are largest, the yardstick's)."""
    replicas, _, _ = layout(job)
    same = dataclasses.replace(job, mode="", stage=0, parallel=1, offload=False, init="config", method=None)
    truth, yardstick = truth_and_yardstick(same, replicas)
    errors = _errors_over_ranks(job, device, prepare, truth)
    if job.mode.startswith("autotp"):
        # layers that AutoTP has split round their partial sums: so does the job with DeepSpeed's own loss
        theirs = _errors_over_ranks(job, device, "no", truth)
        yardstick = {name: max(error, theirs[name]) for name, error in yardstick.items()}
    return errors, yardstick


def _errors_over_ranks(job: Job, device: torch.device, prepare: str, truth: Outcome) -> dict[str, float]:
    with clean_state():
        engine, outcome = train(job, device, prepare)
        errors = errors_of(job, outcome, truth, engine)
        engine.destroy()
    values = torch.tensor(list(errors.values()), dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(errors, values.tolist(), strict=True))
