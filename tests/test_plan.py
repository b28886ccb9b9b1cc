"""cce_dist.plan, the command line, and the search for tiles."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import cce_dist
from cce_dist import Plan, VocabShard, functional, linear_cross_entropy, plan
from cce_dist.__main__ import main
from cce_dist.kernels import config, runtime
from cce_dist.validation import Arguments

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that calls of the loss make."""
    plans: list[Plan] = []
    make = functional.make_plan

    def recorded(*request: Any) -> Plan:
        plans.append(make(*request))
        return plans[-1]

    monkeypatch.setattr(functional, "make_plan", recorded)
    return plans


@pytest.mark.parametrize(
    ("options", "tensors"),
    [
        ({}, {}),
        ({"memory_budget": "min"}, {}),
        ({"memory_budget": 1 << 20, "reduction": "sum"}, {}),
        ({"memory_budget": 1 << 21, "reduction": "none"}, {}),
        ({"method": "recompute"}, {}),
        ({"method": "fused"}, {"dtype": torch.bfloat16}),
        ({}, {"dtype": torch.float16}),
        ({}, {"dtype": torch.float64}),
        ({}, {"hidden_requires_grad": False}),
        ({}, {"weight_requires_grad": False}),
        ({"memory_budget": "min"}, {"hidden_requires_grad": False, "weight_requires_grad": False}),
        ({}, {"main_grad": True}),
        ({"method": "cached"}, {"sequence_parallel": True}),
    ],
    ids=str,
)
def test_the_plan_is_the_calls(made, options, tensors) -> None:
    dtype = tensors.get("dtype", torch.float32)
    hidden = torch.randn(3, 25, 24).to(dtype).requires_grad_(tensors.get("hidden_requires_grad", True))
    weight = torch.randn(1500, 24).to(dtype).requires_grad_(tensors.get("weight_requires_grad", True))
    if tensors.get("main_grad"):
        weight.main_grad = torch.zeros_like(weight)
    shard = VocabShard(0, 1500, 1500, sequence_parallel=tensors.get("sequence_parallel", False))
    linear_cross_entropy(hidden, weight, torch.zeros(3, 25, dtype=torch.int64), shard=shard, **options)
    planned = plan(75, 24, 1500, **{"dtype": torch.float32, "device": "cpu"} | tensors, **options)
    assert made == [planned]
    assert planned == plan(
        75, 24, 1500, **{"dtype": torch.float32, "device": torch.device("cpu")} | tensors, **options
    )


class _Group:
    """Of so many ranks, as far as a plan goes."""

    def size(self) -> int:
        return 2


@pytest.mark.parametrize("wanted", [True, False])
def test_the_plan_of_a_group(wanted) -> None:
    shard = VocabShard(0, 751, 1501, _Group())
    hidden, weight = torch.randn(75, 24, requires_grad=wanted), torch.randn(751, 24, requires_grad=wanted)
    targets = torch.zeros(75, dtype=torch.int64)
    given = Arguments(hidden, weight, targets, None, -100, 1.0, None, shard, None, "mean")
    made = functional._plan_of(given, shard, False)
    asked = {"hidden_requires_grad": wanted, "weight_requires_grad": wanted}
    assert made == plan(75, 24, 1501, dtype=torch.float32, tp=2, device="cpu", **asked)
    # another rank's weight may ask for its gradient
    assert made.peak >= 4 * 24 * 751


def test_what_a_plan_says() -> None:
    planned = plan(65536, 2048, 128256, device="sm_90")
    gradients = 2 * 2048 * (65536 + 128256)
    assert planned.peak == planned.workspace + gradients
    # the default's promise
    assert planned.workspace <= 512 * MIB + 12 * 65536 * 2048
    assert planned.peak < 3.1e9
    assert plan(65536, 2048, 128256, memory_budget="min", device="sm_90").peak < planned.peak
    assert plan(65536, 2048, 128256, tp=8, device="sm_90").peak < planned.peak
    forward = plan(
        65536, 2048, 128256, hidden_requires_grad=False, weight_requires_grad=False, device="sm_90", method="cached"
    )
    assert forward.method == "recompute"


def test_devices(monkeypatch) -> None:
    assert set(config.MULTIPROCESSORS) == (set(config._HALF) | set(config._SAME)) - {"cpu"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plan(8192, 4096, 128256) == plan(8192, 4096, 128256, device="sm_90")
    assert plan(8192, 4096, 128255, device="cpu") == plan(8192, 4096, 128255, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="device is cuda:0, and there is none here"):
        plan(8, 8, 8, device="cuda:0")


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"tokens": -1}, ValueError, "tokens must be at least 0, got -1"),
        ({"tokens": 8.0}, TypeError, "tokens must be an int, got float"),
        ({"hidden_size": 0}, ValueError, "hidden_size must be at least 1"),
        ({"vocab_size": True}, TypeError, "vocab_size must be an int"),
        ({"tp": 0}, ValueError, "tp must be at least 1"),
        ({"dtype": torch.int8}, TypeError, "dtype must be one of"),
        ({"dtype": "bfloat16"}, TypeError, "dtype must be one of"),
        ({"reduction": "max"}, ValueError, "reduction must be one of"),
        ({"method": "slow"}, ValueError, "method must be None or one of"),
        ({"method": "fused", "reduction": "none"}, ValueError, 'reduction "none"'),
        ({"method": "cached", "dtype": torch.float16}, ValueError, "float16 has no range"),
        ({"memory_budget": 1}, ValueError, "nothing fits 1 bytes"),
        ({"memory_budget": "max"}, ValueError, "memory_budget must be bytes"),
        ({"memory_budget": 1e9}, TypeError, "memory_budget must be bytes"),
        ({"device": "sm_10"}, ValueError, "device must be a torch.device or one of sm_80, "),
        ({"device": 90}, TypeError, "device must be a torch.device, a name or None, got int"),
    ],
    ids=str,
)
def test_bad_arguments(options, kind, message) -> None:
    given = {"tokens": 64, "hidden_size": 32, "vocab_size": 1000, "device": "sm_90"} | options
    with pytest.raises(kind, match=re.escape(message)):
        plan(**given)


_PLAN = ("plan", "--tokens", "65536", "--hidden", "2048", "--vocab", "128256")


def test_plan_command(capsys) -> None:
    assert main([*_PLAN, "--tp", "8", "--device", "sm_90"]) == 0
    printed = capsys.readouterr().out
    rows = re.findall(
        r"^(recompute|cached|fused) +(.*?)  +([\d.]+) +([\d.]+) +([\d,]+) +([\d,]+) +([\d,]+)(.*)", printed, re.M
    )
    assert {method for method, *_ in rows} == {"recompute", "cached", "fused"}
    (chosen,) = (row for row in rows if "chosen" in row[-1])
    planned = plan(65536, 2048, 128256, tp=8, device="sm_90")
    assert chosen[0] == planned.method
    assert [int(chosen[i].replace(",", "")) for i in (4, 5, 6)] == [
        round(x / MIB) for x in (planned.workspace, planned.held, planned.peak)
    ]  # fmt: skip


def test_the_readme_shows_the_plan_commands_table(capsys) -> None:
    readme = (ROOT / "README.md").read_text()
    (arguments,) = re.findall(r"^python -m cce_dist (plan .*)$", readme, re.M)
    (shown,) = re.findall(r"```text\n(method.*?)\.\.\.\n```", readme, re.S)
    assert main(arguments.split()) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--budget", "min"], r"recompute .*<- chosen"),
        (["--budget", "20000"], r"fused .*<- chosen"),
        (["--budget", "2500", "--reduction", "none"], r"cached .*<- chosen"),
        (["--dtype", "float16"], r"recompute .*<- chosen"),
        (["--budget", "20000", "--main-grad", "--sequence-parallel"], r"cached .*<- chosen"),
    ],
    ids=str,
)
def test_budgets_of_the_plan_command(capsys, options, expected) -> None:
    assert main([*_PLAN, "--device", "sm_90", *options]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(expected, printed)) == 1, printed
    if "fused" in printed:
        assert not {"none", "float16"}.intersection(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "1"], "nothing fits 1048576 bytes"),
        (["--budget", "most"], "expected MiB or min, got 'most'"),
        (["--tp", "0"], "tp must be at least 1"),
        (["--device", "sm_1"], "device must be a torch.device or one of"),
        (["--dtype", "int8"], "invalid choice"),
    ],
    ids=str,
)
def test_bad_arguments_of_the_plan_command(capsys, options, message) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*_PLAN, *options])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


_WITHOUT_TRITON = """
import runpy, sys
import torch
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "triton" or name.startswith("triton."):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocker())
sys.argv = ["cce_dist", "check"]
runpy.run_module("cce_dist", run_name="__main__")
"""


def test_check_command_without_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TRITON],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        # small products: threads would wait for each other
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"cce_dist {cce_dist.__version__}, " in done.stdout
    assert "no Triton, " in done.stdout
    assert "path: plain PyTorch, since " in done.stdout
    assert "all good, in " in done.stdout


@pytest.mark.parametrize(
    ("machine", "triton", "expected"),
    [
        ("sm_90", True, "the Triton kernels, since there are Triton and sm_90; its copy engine (TMA) fetch"),
        ("sm_80", True, "the Triton kernels, since there are Triton and sm_80; its threads fetch"),
        ("sm_75", True, "plain PyTorch, since sm_75 is older than sm_80"),
        ("sm_90", False, "plain PyTorch, since there is no Triton from 3.5 on"),
        ("cpu", True, "plain PyTorch, since torch sees no GPU"),
        ("a build for CPUs", True, "plain PyTorch, since this torch is built for CPUs"),
    ],
)
def test_check_says_which_path_is_taken_and_why(monkeypatch, machine, triton, expected) -> None:
    module = importlib.import_module("cce_dist.__main__")
    serves = triton and machine in ("sm_80", "sm_90")
    device = torch.device("cuda" if machine.startswith("sm_") else "cpu")
    monkeypatch.setattr(module, "target_of", lambda device: machine)
    monkeypatch.setattr(module, "triton_serves", lambda tensor: serves)
    monkeypatch.setattr(module.torch, "empty", lambda *size, device: None)
    monkeypatch.setattr(runtime, "HAS_TRITON", triton)
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "cuda", None if machine == "a build for CPUs" else "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    assert module._path(device).startswith(expected)


def test_check_names_the_version_of_nccl(monkeypatch) -> None:
    module = importlib.import_module("cce_dist.__main__")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    assert module._nccl() == "NCCL 2.27.5"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert module._nccl() == "no NCCL"


def test_check_finds_what_is_wrong(monkeypatch, capsys) -> None:
    module = importlib.import_module("cce_dist.__main__")
    monkeypatch.setattr(module, "_SHAPES", module._SHAPES[:1])
    right = linear_cross_entropy

    def wrong(hidden: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if options["method"] == "fused":
            raise RuntimeError("no such instruction")
        scale = 1.01 if options["method"] == "cached" else 1.0
        return right(scale * hidden, *args, **options)

    monkeypatch.setattr(module, "linear_cross_entropy", wrong)
    assert main(["check"]) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("37 x")]
    assert [row.endswith("ok") for row in rows] == ["recompute" in row for row in rows]
    assert any("RuntimeError: no such instruction" in row for row in rows)


def test_a_failing_check_gives_the_exit_status(monkeypatch, capsys) -> None:
    def broken(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(cce_dist, "linear_cross_entropy", broken)
    monkeypatch.setattr(sys, "argv", ["cce_dist", "check"])
    monkeypatch.delitem(sys.modules, "cce_dist.__main__")
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("cce_dist", run_name="__main__")
    assert stopped.value.code == 1
    printed = capsys.readouterr().out
    assert f"\n{printed.count('FAILED')} failed, in " in printed
    assert not re.search(r"ok$", printed, re.M)


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("tqdm")
    pytest.importorskip("triton", reason="needs Triton to compile the kernels")
    if runtime.INTERPRETED:
        pytest.skip("the interpreter has replaced the compiler")
    monkeypatch.syspath_prepend(str(ROOT / "launch"))
    for name in ("tune", "compiled", "machine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("tune")


_SMALL = ("--block-n", "64", "--block-v", "64", "--block-d", "32", "--warps", "4", "--stages", "2")


def test_tiles_compile_without_a_gpu(tune, capsys) -> None:
    tune.main(["--compile-only", "sm_80", *_SMALL, "--products", "hidden", "added"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("sm_80, 163 KiB")
    present, small = lines[2:]
    assert [int(cell) for cell in small.split()[:6]] == [64, 64, 32, 4, 2, 8]
    # shared memory in KiB, then registers of the two kernels
    for row in (present, small):
        shared, *registers = row.split()[6:]
        assert 0 < int(shared) <= 163
        assert all(0 < int(cell.split("+")[0]) <= 255 for cell in registers)
        assert len(registers) == 2
    assert int(small.split()[6]) < int(present.split()[6])


def test_candidates_fit(tune) -> None:
    args = tune.parse([])
    for chip in ("sm_80", "sm_86", "sm_90", "gfx942"):
        present, *others = tune.candidates(args, chip)
        assert present == config.tiles_for(chip, torch.bfloat16)
        assert others
        assert all(config.TILE_V % tiles.BLOCK_V == 0 for tiles in others)
        line = tune.line_of(chip, present)
        assert line in Path(config.__file__).read_text()
        assert eval("{" + line + "}", {"Tiles": config.Tiles}) == {chip: present}
    with tune.in_use("sm_89", others[0]):
        assert config.tiles_for("sm_89", torch.bfloat16) == others[0]
    assert config.tiles_for("sm_89", torch.bfloat16) != others[0]


def test_bad_tiles(tune, capsys) -> None:
    for options in (["--block-v", "96"], ["--compile-only", "sm_12"]):
        with pytest.raises(SystemExit) as stopped:
            tune.parse(options)
        assert stopped.value.code == 2
    errors = capsys.readouterr().err
    assert "96 does not divide 256" in errors
    assert "no sm_12 among sm_80, " in errors


def test_times_are_told_by_their_sum(tune, capsys, monkeypatch) -> None:
    class Clock:
        device = torch.device("cpu")

        def name(self) -> str:
            return "a chip"

        def seconds(self, call: Any) -> float:
            call()
            # the narrower tile takes half of the time
            return config.tiles_for("cpu", torch.float16).BLOCK_N / 32

    args = tune.parse(["--shape", "40x24x300", "--dtype", "float16", "--repeat", "1", "--block-n", "16", *_SMALL[2:]])
    monkeypatch.setattr(tune, "candidates", lambda args, chip: [config._HALF["cpu"], config.Tiles(16, 64, 32, 4, 1)])
    tune.time_all(args, Clock())
    table = capsys.readouterr().out.splitlines()
    first, second = (line.split() for line in table[3:5])
    assert first[0] == "16"
    assert float(first[7]) == 0.5
    assert second[0] == "32"
    assert table[4].endswith("<- the present entry")
    assert table[-1].strip() == '"cpu": Tiles(16, 64, 32, num_warps=4, num_stages=1),'
