"""cce_dist.plan, the command line, and the search for tiles."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import cce_dist
from cce_dist import Plan, VocabShard, functional, linear_cross_entropy, plan
from cce_dist.__main__ import main
from cce_dist.kernels.config import _HALF, _SAME, MULTIPROCESSORS

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
    ],
    ids=str,
)
def test_the_plan_is_the_calls(made, options, tensors) -> None:
    dtype = tensors.get("dtype", torch.float32)
    hidden = torch.randn(3, 25, 24).to(dtype).requires_grad_(tensors.get("hidden_requires_grad", True))
    weight = torch.randn(1500, 24).to(dtype).requires_grad_(tensors.get("weight_requires_grad", True))
    linear_cross_entropy(hidden, weight, torch.zeros(3, 25, dtype=torch.int64), **options)
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
    made = functional._plan_of(hidden, weight, None, shard, "mean", None, None)
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
    assert set(MULTIPROCESSORS) == (set(_HALF) | set(_SAME)) - {"cpu"}
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


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


_PLAN = ("plan", "--tokens", "65536", "--hidden", "2048", "--vocab", "128256")


def test_plan_command() -> None:
    done = run("-m", "cce_dist", *_PLAN, "--tp", "8", "--device", "sm_90")
    assert done.returncode == 0, done.stderr
    rows = re.findall(
        r"^(recompute|cached|fused) +(.*?)  +([\d.]+) +([\d.]+) +([\d,]+) +([\d,]+)(.*)", done.stdout, re.M
    )
    assert {method for method, *_ in rows} == {"recompute", "cached", "fused"}
    (chosen,) = (row for row in rows if "chosen" in row[-1])
    planned = plan(65536, 2048, 128256, tp=8, device="sm_90")
    assert chosen[0] == planned.method
    assert [int(chosen[i].replace(",", "")) for i in (4, 5)] == [
        round(planned.workspace / MIB), round(planned.peak / MIB),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--budget", "min"], r"recompute .*<- chosen"),
        (["--budget", "20000"], r"fused .*<- chosen"),
        (["--budget", "2500", "--reduction", "none"], r"cached .*<- chosen"),
        (["--dtype", "float16"], r"recompute .*<- chosen"),
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


def test_check_command(capsys) -> None:
    assert main(["check"]) == 0
    printed = capsys.readouterr().out
    assert "all good" in printed
    assert cce_dist.__version__ in printed


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
