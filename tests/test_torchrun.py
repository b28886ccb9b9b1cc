"""The same checks as a real torchrun job."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif("RANK" in os.environ, reason="is inside a torchrun job")
# both ranks, even and uneven shards: the groups of 1 and 2 ran, those of 3 and 4 said why not
@pytest.mark.parametrize(
    ("file", "names", "expected"),
    [
        ("tests/test_sharded.py", "test_every_layout and even", "4 passed, 4 skipped"),
        pytest.param("tests/test_dtensor.py", "test_a_sharded_weight", "8 passed, 8 skipped", marks=pytest.mark.slow),
    ],
)
def test_checks_run_under_torchrun(file, names, expected) -> None:
    root = Path(__file__).parents[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "pytest", file, "-q", "-p", "no:cacheprovider", "-k", names,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert len(re.findall(expected, result.stdout)) == 2, result.stdout
