"""The package as others get it: built, installed elsewhere, and its types in their projects."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import cce_dist

ROOT = Path(__file__).resolve().parent.parent
USER = Path(__file__).with_name("typed_user.py")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Callable[..., None]:
    """``installed(*arguments)`` runs Python where the package is what pip made of its sdist, and nothing else of this
    checkout is there."""
    sdist = pytest.importorskip("hatchling.builders.sdist", reason="needs hatchling")
    pytest.importorskip("pip", reason="needs pip")
    folder = tmp_path_factory.mktemp("installed")
    (built,) = sdist.SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", folder / "site", built]
    subprocess.run(command, check=True, cwd=folder, timeout=240)
    # no GPU, whatever the machine
    environment = os.environ | {"PYTHONPATH": str(folder / "site"), "CUDA_VISIBLE_DEVICES": ""}

    def run(*arguments: str | os.PathLike[str]) -> None:
        subprocess.run([sys.executable, *arguments], check=True, cwd=folder, env=environment, timeout=240)

    return run


def test_a_users_project_runs_on_what_pip_installs(installed) -> None:
    code = (
        "import runpy, sys, cce_dist, cce_dist.__main__ as command\n"
        "assert cce_dist.__file__.startswith(sys.path[1]) and sys.path[1].endswith('site'), sys.path\n"
        "assert command.main('plan --tokens 64 --hidden 32 --vocab 1000 --device cpu'.split()) == 0\n"
        f"runpy.run_path({str(USER)!r}, run_name='__main__')"
    )
    installed("-c", code)


def test_the_users_project_has_every_public_name() -> None:
    names = {node.id for node in ast.walk(ast.parse(USER.read_text())) if isinstance(node, ast.Name)}
    assert set(cce_dist.__all__) <= names


@pytest.mark.slow  # mypy reads all of torch; .ci/run does so once, for the package and for this file
def test_types_in_a_users_project(installed, tmp_path) -> None:
    pytest.importorskip("mypy", reason="needs mypy")
    installed("-m", "mypy", "--strict", "--config-file", os.devnull, "--cache-dir", tmp_path, USER)


def known_vulnerabilities(requirements: list[str], folder: Path) -> dict[str, list[str]]:
    """By package, of exact versions; one that the data do not know is left out."""
    listed = folder / "requirements.txt"
    listed.write_text("\n".join(requirements))
    options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off", "--timeout", "15"]
    done = subprocess.run(
        [sys.executable, "-m", "pip_audit", "--requirement", listed, *options],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    if not done.stdout:
        pytest.skip(f"pip-audit cannot reach its data: {done.stderr.strip().splitlines()[-1]}")
    packages = json.loads(done.stdout)["dependencies"]
    return {p["name"]: [v["id"] for v in p["vulns"]] for p in packages if "vulns" in p}


def test_no_version_that_is_pinned_has_a_known_vulnerability(tmp_path) -> None:
    pytest.importorskip("pip_audit", reason="needs pip-audit")
    # a version that has several: where none is found, the data are not those of vulnerabilities
    if not known_vulnerabilities(["requests==2.19.0"], tmp_path).get("requests"):
        pytest.skip("the package index that pip-audit reaches knows no vulnerabilities")
    pinned = re.findall(r"^[\w-]+==[\w.]+", (ROOT / "launch" / "constraints.txt").read_text(), re.MULTILINE)
    assert len(pinned) > 20
    found = known_vulnerabilities([*pinned, "torch==2.13.0", "triton==3.9.0"], tmp_path)
    assert {"torch", "transformers"} <= found.keys()
    assert not {name: ids for name, ids in found.items() if ids}
