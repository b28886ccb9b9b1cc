"""launch/benchmark.py end to end on a tiny problem: rows that fail, ratios to the row's own floor, files."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("tqdm")
LAUNCH = Path(__file__).resolve().parent.parent / "launch"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.syspath_prepend(str(LAUNCH))
    for name in ("benchmark", "comparison", "machine", "options", "peers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("benchmark")


def figures(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    found = json.loads(path.read_text())
    (shape,) = found["shapes"]
    return found, {row["name"]: row for row in shape["rows"]}


def test_a_run_on_a_cpu(tmp_path, monkeypatch, capsys, benchmark) -> None:
    def broken(_: object) -> Any:
        raise ImportError("no such peer\nand more about it")

    monkeypatch.setitem(benchmark.peers.PEERS, "broken", broken)
    path, picture = tmp_path / "new" / "figures.json", tmp_path / "picture.png"
    drawn = ["--picture", str(picture)] if importlib.util.find_spec("matplotlib") else []
    options = ["--shape", "33x16x301", "--ignored", "0.2", "--repeat", "3", "--peers", "broken,pytorch"]
    benchmark.main([*options, "--json", str(path), *drawn])

    found, rows = figures(path)
    assert found["versions"]["torch"]
    assert found["arguments"]["repeat"] == 3
    # a peer that fails is a row that says why, and the next one runs
    assert rows["broken"]["failure"] == "ImportError: no such peer"
    printed = capsys.readouterr().out
    assert "ImportError: no such peer" in printed
    for name, products in (("cce_dist", 3), ("recompute", 4), ("pytorch", 3)):
        row = rows[name]
        assert row["failure"] is None
        times = [row[kind] for kind in ("floor_seconds", "seconds", "forward_floor_seconds", "forward_seconds")]
        assert [len(turns) for turns in times] == [3] * 4
        floor, both, forward_floor, forward = map(statistics.median, times)
        assert row["products"] == products
        assert row["ratio"] == pytest.approx(both / floor)
        assert row["forward_ratio"] == pytest.approx(forward / forward_floor)
        assert row["cost"] == pytest.approx(both / floor * products / 3)
        assert all(error < 1e-5 for error in row["errors"].values())
        assert f"\n{name} " in printed
    assert picture.exists() == bool(drawn)


def test_what_options_cost(tmp_path, capsys, benchmark) -> None:
    options = importlib.import_module("options")
    path = tmp_path / "options.json"
    rows = options.main(["--shape", "33x16x301", "--repeat", "2", "--json", str(path)])
    assert json.loads(path.read_text())["rows"] == rows
    failed = {row["row"] for row in rows if "failure" in row}
    # what is not installed here
    assert failed <= {"verl's, with entropies", "liger's losses"}
    assert {row["method"] for row in rows} == {"default", "recompute", "fused"}
    assert all(row["ratio"] > 0 for row in rows if row["row"] not in failed)
    assert f"{'and entropies':24}" in capsys.readouterr().out


def test_shapes_come_from_all_flags(benchmark) -> None:
    flags = "--shape 1x2x3 --tokens 8 9 --tokens 10 --model llama-3-8b --hidden 5 --vocab 6 7 --budgets min 1.5"
    args = benchmark.parse(flags.split())
    heads = [(4096, 128256), (5, 6), (5, 7)]
    assert args.shape == [(1, 2, 3), *((n, *head) for n in (8, 9, 10) for head in heads)]
    assert args.budgets == ["min", 3 << 19]
    assert benchmark.parse([]).shape == [(2048, 512, 32768)]
    with pytest.raises(SystemExit):
        benchmark.parse(["--peers", "pytorch,nonesuch"])


def test_schemes_that_share_the_vocabulary(benchmark) -> None:
    assert benchmark.parse(["--peers", "megatron,verl,apple,deepspeed"]).peers == list(
        filter(benchmark.peers.SHARDED.get, ("megatron", "verl", "apple", "deepspeed"))
    )


def test_exposed_is_what_runs_beside_nothing(benchmark) -> None:
    machine = importlib.import_module("machine")

    def share(*kernels: tuple[str, float, float]) -> float:
        # in whatever order they come
        (found,) = {machine.exposed_share(order) for order in itertools.permutations(kernels)}
        return found

    reduction = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    assert share(("mm", 0, 4), ("mm", 6, 8)) == 0
    # alone from 4 to 6 and from 9 to 10; nothing runs from 10 to 15
    assert share(("mm", 0, 4), (reduction, 3, 7), ("mm", 6, 9), (reduction, 8, 10), ("row", 15, 20)) == 3 / 20
    # two that communicate at once are counted once, and one product hides what it covers
    assert share((reduction, 1, 4), (reduction, 2, 5), ("mm", 0, 1), ("row", 3, 3.5)) == 3.5 / 5
    assert share(("mm", 10, 20), ("row", 12, 14), (reduction, 11, 19)) == 0
    # what ends first does not end what began before it
    assert share((reduction, 0, 10), ("mm", 1, 3), ("mm", 2, 9), ("row", 4, 5)) == 2 / 10


def test_exposed_has_a_column(benchmark) -> None:
    args, machine = benchmark.parse(["--sequence-parallel"]), benchmark.Machine()
    machine.ranks = 2
    times = {name: [1.0] for name in ("floor_seconds", "seconds", "forward_floor_seconds", "forward_seconds")}
    errors = {"loss": 1e-7, "d_hidden": 1e-3, "d_weight": 1e-3}
    measured = {**times, "peak": 1 << 34, "errors": errors}
    rows = [
        benchmark.Row("cce_dist, 1 rank", None, "method", **measured),
        benchmark.Row("recompute", None, "method", 2, 4, **measured, exposed=0.01234),
        benchmark.Row("megatron", None, "peer", 2, **measured, exposed=1.0),
    ]
    lines = benchmark.table((8192, 4096, 128256), rows, args, machine).splitlines()
    assert "sequence parallel: " in lines[2]
    assert all(len(line) <= 118 for line in lines[2:])
    assert [line.split()[-1] for line in lines[-5:]] == ["exposed", "%", "1.0e-03", "1.23", "100.00"]


def test_memory_on_a_cpu_is_that_of_the_tensors(benchmark) -> None:
    hidden, weight = torch.randn(64, 8), torch.randn(1000, 8)

    def logits() -> torch.Tensor:
        return (hidden @ weight.T).exp_()

    assert benchmark.Machine().peak(logits) == 64 * 1000 * 4
    # freed before the next is made
    assert benchmark.Machine().peak(lambda: [logits().sum() for _ in range(3)]) == pytest.approx(
        64 * 1000 * 4, abs=64
    )
    # the logits, their log-softmax and its gradient
    targets = torch.zeros(64, dtype=torch.int64)
    loss = benchmark.peers.pytorch(None)
    weight.requires_grad_()
    peak = benchmark.Machine().peak(lambda: loss(hidden, weight, targets).backward())
    assert peak == pytest.approx(3 * 64 * 1000 * 4, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--sequence-parallel"]], ids=["whole", "slices"])
def test_two_ranks_share_the_vocabulary(tmp_path, flags) -> None:
    path = tmp_path / "figures.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--shape", "33x16x601", "--repeat", "2", "--peers", "megatron,pytorch", "--json", str(path), *flags]
    outer = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = outer | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(LAUNCH.parent)}
    subprocess.run([*launcher, str(LAUNCH / "benchmark.py"), *options], check=True, env=environment, timeout=120)
    found, rows = figures(path)
    assert found["ranks"] == 2
    # PyTorch's whole logits have no slice
    assert "pytorch" not in rows
    for name, ranks in (("cce_dist, 1 rank", 1), ("cce_dist", 2), ("megatron", 2)):
        row = rows[name]
        assert row["failure"] is None
        assert row["ratio"] == pytest.approx(
            statistics.median(row["seconds"]) / (statistics.median(row["floor_seconds"]) / ranks)
        )
        assert all(error < 1e-5 for error in row["errors"].values())
