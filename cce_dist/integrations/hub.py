"""This package as a kernel of Hugging Face's Kernel Hub: ``python -m cce_dist.integrations.hub FOLDER`` writes what a
repository of the hub holds, and what ``kernels.get_local_kernel`` loads.

It is Python alone, so the same files serve every version of torch; there is a copy for each backend, because the
hub's metadata name one.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
# what imports other libraries, or is for the command line
_LEFT_OUT = {"__main__.py"}
_INTEGRATIONS = {"__init__.py", "layers.py"}
# backends, and the chips that the kernels are compiled for
BACKENDS = {"cpu": None, "cuda": ["8.0+PTX"], "rocm": ["gfx942"]}
_EXPORTS = """
from .integrations import layers

__all__ += ["layers"]
"""


def build(folder: str | os.PathLike[str], name: str = "cut-cross-entropy", version: int = 1) -> list[Path]:
    """Writes ``build/torch-<backend>`` for each backend into ``folder``, in the place of older ones.

    Args:
        folder: the root of the repository; made where there is none.
        name: of the kernel, the repository's: lower-case letters, digits and dashes.
        version: of the kernel, at least 0; the hub keeps each on a branch of its own, as ``v1``.

    Returns: the folders of the backends.

    Raises ``ValueError`` for a name or version that the hub does not take.
    """
    if not re.fullmatch("[a-z][-a-z0-9]*[a-z0-9]", name):
        raise ValueError(f"name must be lower-case letters, digits and dashes, as cut-cross-entropy, got {name!r}")
    if version < 0:
        raise ValueError(f"version must be at least 0, got {version}")
    files = _files()
    # two builds with different files can be loaded side by side
    digest = hashlib.sha256(b"".join(path.encode() + text for path, text in files.items())).hexdigest()[:8]
    built = []
    for backend, archs in BACKENDS.items():
        variant = Path(folder) / "build" / f"torch-{backend}"
        shutil.rmtree(variant, ignore_errors=True)
        for path, text in files.items():
            (variant / path).parent.mkdir(parents=True, exist_ok=True)
            (variant / path).write_bytes(text)
        metadata = {
            "name": name,
            "id": f"_{name.replace('-', '_')}_{backend}_{digest}",
            "version": version,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend} if archs is None else {"type": backend, "archs": archs},
            "digest": {"algorithm": "sha256", "files": {path: _hash(text) for path, text in files.items()}},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        built.append(variant)
    return built


def _files() -> dict[str, bytes]:
    """Path in the kernel -> content, sorted."""
    found = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        inside = path.relative_to(_PACKAGE)
        skipped = inside.name in _LEFT_OUT or (inside.parts[0] == "integrations" and inside.name not in _INTEGRATIONS)
        if not skipped:
            found[inside.as_posix()] = path.read_bytes()
    found["__init__.py"] += _EXPORTS.encode()
    return found


def _hash(text: bytes) -> str:
    return base64.b64encode(hashlib.sha256(text).digest()).decode()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cce_dist.integrations.hub", description=__doc__)
    parser.add_argument("folder", help="the root of the hub's repository")
    parser.add_argument("--name", default="cut-cross-entropy")
    parser.add_argument("--version", type=int, default=1)
    args = parser.parse_args(arguments)
    try:
        for variant in build(args.folder, args.name, args.version):
            print(variant)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
