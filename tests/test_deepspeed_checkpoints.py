"""Whole weights out of every layout and back, DeepSpeed's checkpoints, and its universal ones in another layout."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from deepspeed_jobs import Job, clean_state, make_engine, make_model, micro_batches, run_step
from tolerance import LOSS

from cce_dist.integrations.deepspeed import whole_state_dict


def one_loss(engine, job, device):
    (((ids, labels),),) = micro_batches(Job("", 0, vocab=job.vocab), 1, 77)
    return engine(input_ids=ids.to(device), labels=labels.to(device)).loss


def check_whole(device, job, other):
    with clean_state():
        engine = make_engine(job, device)
        run_step(job, engine, 0, device)
        engine.step()
        found = one_loss(engine, job, device)
        engine.backward(found)
        state = [whole_state_dict(engine)]
        assert bool(state[0]) == (dist.get_rank() == 0)
        engine.destroy()
    # one tensor under both names of a tie
    dist.broadcast_object_list(state, 0)
    plain = make_model(job.tied, job.vocab, seed=9).to(torch.float32)
    plain.load_state_dict(state[0], strict=True)
    plain.to(device).eval()
    assert plain(**inputs_of(job, device)).loss.item() == pytest.approx(found.item(), rel=LOSS)
    with clean_state():
        engine = make_engine(other, device, plain.cpu().train())
        assert one_loss(engine, other, device).item() == pytest.approx(found.item(), rel=LOSS)


def inputs_of(job, device):
    (((ids, labels),),) = micro_batches(Job("", 0, vocab=job.vocab), 1, 77)
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


@pytest.mark.parametrize(
    ("job", "other"),
    [
        (Job("zero", 0, tied=True), Job("mpu", 1, parallel=4, tied=True)),
        (Job("zero", 3), Job("autotp-vocab", 1, parallel=2)),
        (Job("autotp", 1, parallel=2), Job("zero", 2)),
        (Job("autotp-vocab", 0, parallel=4), Job("zero", 3)),
        (Job("autotp-vocab", 2, parallel=2, tied=True), Job("zero", 1, tied=True)),
        (Job("autotp-vocab", 3, parallel=2, tied=True), Job("mpu", 3, parallel=2, tied=True)),
        (Job("mpu", 1, parallel=4), Job("autotp-vocab", 3, parallel=2)),
        (Job("mpu", 3, parallel=2, tied=True), Job("zero", 3, tied=True)),
    ],
    ids=str,
)
@pytest.mark.slow
def test_whole_weights_and_back(world, job, other) -> None:
    if world.size != 4:
        pytest.skip("groups of two and of four ranks")
    world.run(check_whole, job, other)


# an optimizer with states
ADAM = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}


def steps(job, engine, first, device):
    found = []
    for step in range(first, first + 2):
        found.append(run_step(job, engine, step, device))
        engine.step()
    return found


def check_resume(device, job, folder):
    with clean_state():
        engine = make_engine(job, device, optimizer=ADAM)
        steps(job, engine, 0, device)
        engine.save_checkpoint(folder, tag="here")
        expected = steps(job, engine, 2, device)
        engine.destroy()
    with clean_state():
        engine = make_engine(job, device, make_model(job.tied, job.vocab, seed=5), optimizer=ADAM)
        engine.load_checkpoint(folder, tag="here")
        assert steps(job, engine, 2, device) == expected


@pytest.mark.parametrize(
    "job", [Job("zero", 3), Job("autotp-vocab", 1, parallel=2, tied=True), Job("mpu", 3, parallel=2)], ids=str
)
def test_goes_on_with_the_same_bits(world, shared_path, job) -> None:
    world.run(check_resume, job, str(shared_path))


def check_universal(device, job, others, folder):
    with clean_state():
        engine = make_engine(job, device, optimizer=ADAM)
        steps(job, engine, 0, device)
        engine.save_checkpoint(folder, tag="here")
        state = whole_state_dict(engine)
        expected = steps(job, engine, 2, device)
        engine.destroy()
    if dist.get_rank() == 0:
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        paths = ["--input_folder", f"{folder}/here", "--output_folder", f"{folder}/universal"]
        workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        done = subprocess.run([*command, *paths, *workers], capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    dist.barrier()
    for other in others:
        with clean_state():
            model = make_model(other.tied, other.vocab, seed=5)
            universal = {"checkpoint": {"load_universal": True}}
            engine = make_engine(other, device, model, optimizer=ADAM, **universal)
            engine.load_checkpoint(folder, tag="universal")
            found = whole_state_dict(engine)
            assert found.keys() == state.keys()
            assert all(torch.equal(found[name], state[name]) for name in state)
            if other.parallel == job.parallel:
                # as many data-parallel ranks: the steps see the same tokens
                assert steps(other, engine, 2, device) == pytest.approx(expected, rel=LOSS)
            engine.destroy()


@pytest.mark.parametrize(
    ("job", "others"),
    [
        (
            Job("mpu", 1, parallel=2, tied=True),
            [Job("autotp-vocab", 1, parallel=2, tied=True), Job("mpu", 1, parallel=4, tied=True)],
        ),
        (Job("mpu", 1, parallel=4), [Job("mpu", 1, parallel=2), Job("zero", 1)]),
        (
            Job("autotp-vocab", 1, parallel=2),
            [Job("autotp-vocab", 1, parallel=2), Job("autotp-vocab", 1, parallel=4)],
        ),
        (Job("autotp-vocab", 1, parallel=4, tied=True), [Job("autotp-vocab", 1, parallel=2, tied=True)]),
    ],
    ids=str,
)
@pytest.mark.slow
def test_universal_checkpoints(world, shared_path, job, others) -> None:
    if world.size != 4:
        pytest.skip("two groups of two ranks")
    world.run(check_universal, job, others, str(shared_path))
