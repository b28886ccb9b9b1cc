"""Text files -> a byte-level BPE tokenizer trained on them -> one flat tensor of ids -> micro-batches by number."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BORDER, BORDER_ID = "<|endoftext|>", 0
IGNORED = -100
# the border and each byte
SMALLEST_VOCABULARY = 257
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def text_files(paths: list[Path] | None) -> list[Path]:
    """The text files among ``paths`` and below its folders, or the Python standard library's sources, in a fixed
    order. ``ValueError`` where there are none."""
    if paths is None:
        root = Path(sysconfig.get_path("stdlib"))
        found = [p for p in root.rglob("*.py") if not _SKIPPED_FOLDERS & set(p.relative_to(root).parts)]
    else:
        found = []
        for path in paths:
            if not path.exists():
                raise ValueError(f"--data: {path} does not exist; expected a text file or a folder of text files")
            found += _below(path) if path.is_dir() else [path]
    files = sorted({path for path in found if _is_text(path)})
    if not files:
        where = ", ".join(map(str, paths or [sysconfig.get_path("stdlib")]))
        raise ValueError(f"--data: no text files in {where}; expected a text file or a folder of text files")
    return files


def _below(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def _is_text(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(8192)
    return bool(head) and b"\0" not in head


def cache_folder(files: list[Path], vocab_size: int, cache: Path) -> Path:
    """Where ``prepare`` puts what it makes of these texts."""
    digest = hashlib.sha256()
    for path in files:
        text = path.read_bytes()
        digest.update(len(text).to_bytes(8, "little") + text)
    return cache / f"{digest.hexdigest()[:16]}-{vocab_size}"


def prepare(files: list[Path], vocab_size: int, folder: Path) -> None:
    """Writes ``tokenizer.json`` and ``tokens.pt``: where the latter is, all is there."""
    documents = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    tokenizer = _train_tokenizer(documents, vocab_size)
    ids: list[torch.Tensor] = []
    for start in range(0, len(documents), 64):
        for encoding in tokenizer.encode_batch_fast(documents[start : start + 64]):
            ids.append(torch.tensor([*encoding.ids, BORDER_ID], dtype=torch.int32))
    folder.mkdir(parents=True, exist_ok=True)
    # other runs may make the same files at the same time: each writes its own and the last rename wins
    ours = f".partial-{os.getpid()}"
    tokenizer.save(str(folder / f"tokenizer.json{ours}"))
    torch.save(torch.cat(ids), folder / f"tokens.pt{ours}")
    for name in ("tokenizer.json", "tokens.pt"):
        (folder / f"{name}{ours}").replace(folder / name)


def _train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BORDER],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


class Batches:
    """Micro-batch ``number`` of an endless sequence, a pure function of (seed, number): a resumed run, or one with
    another number of ranks, reads the same text.

    The windows of ``length`` tokens are shuffled anew in each epoch. ``ValueError`` where they do not fill a batch.
    """

    def __init__(self, tokens: torch.Tensor, length: int, batch: int, seed: int) -> None:
        self.tokens, self.length, self.batch, self.seed = tokens, length, batch, seed
        self.windows = (len(tokens) - 1) // length
        if self.windows < batch:
            raise ValueError(
                f"--data: {len(tokens)} tokens make {self.windows} sequences of {length}, expected at least the "
                f"{batch} of a batch"
            )
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def __call__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """-> (ids, labels), each [batch, length] int64. Labels across a border of two documents are ``IGNORED``."""
        first = number * self.batch
        starts = torch.stack([self._window(i) for i in range(first, first + self.batch)]) * self.length
        text = self.tokens[starts[:, None] + torch.arange(self.length + 1)].long()
        ids, labels = text[:, :-1], text[:, 1:]
        return ids, labels.masked_fill(ids == BORDER_ID, IGNORED)

    def _window(self, index: int) -> torch.Tensor:
        epoch, position = divmod(index, self.windows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((epoch << 32) + self.seed)
            self._epoch, self._order = epoch, torch.randperm(self.windows, generator=generator)
        return self._order[position]


if __name__ == "__main__":
    # a process of its own, so that a tokenizer's memory does not count as the training's
    prepare([Path(line) for line in sys.stdin.read().split("\0")], int(sys.argv[1]), Path(sys.argv[2]))
