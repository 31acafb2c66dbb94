"""Text as bytes: which files, how they are split, and which bytes make up a batch."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from jaxtyping import Int, UInt8

# Folders of the standard library's tree that are tests or not the library's.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
VALIDATION_SHARE = 10  # one in so many

Part: TypeAlias = slice | Int[np.ndarray, " part"]
ALL = slice(None)


@dataclasses.dataclass(frozen=True)
class Text:
    """Bytes to train on, and others to validate on.

    Attributes:
      train: uint8 ``[bytes]``.
      validation: uint8 ``[bytes]``.
      source: where they come from and how they were split, in words.
    """

    train: UInt8[np.ndarray, " bytes"]
    validation: UInt8[np.ndarray, " bytes"]
    source: str


def load(path: str | None, *, window: int) -> Text:
    """Reads text and splits it.

    Several files are split by file (`split_files`). A single one is split by position: its first nine tenths
    are trained on, the rest validates.

    Args:
      path: a file, or a folder whose text files are all read. None: the Python sources of the standard library of
        this interpreter, without tests and installed packages.
      window: bytes that either part must hold at least.

    Raises:
      ValueError: if there is no such path, or too little text in it.
    """
    files = _standard_library() if path is None else _files(Path(path))
    where = "the Python standard library" if path is None else str(path)
    if len(files) == 1:
        [content] = files.values()
        cut = len(content) * (VALIDATION_SHARE - 1) // VALIDATION_SHARE
        train, validation, how = content[:cut], content[cut:], "one file, its last tenth for validation"
    else:
        chosen = split_files(list(files))
        train, validation = (
            b"\n".join(content for name, content in files.items() if (name in chosen) is held_out)
            for held_out in (False, True)
        )
        how = f"{len(files)} files, {len(chosen)} of them for validation"
    if min(len(train), len(validation)) < window:
        raise ValueError(
            f"{where} holds too little text: {len(train)} bytes to train on and {len(validation)} for validation "
            f"({how}), where one sequence takes {window}; give more text or a smaller seq_len"
        )
    return Text(np.frombuffer(train, np.uint8), np.frombuffer(validation, np.uint8), f"{where} ({how})")


def split_files(names: Sequence[str]) -> set[str]:
    """The names of the files that validate: about one in ten, chosen by a hash of the name alone.

    The choice for a file does not depend on the others, except that neither part is ever empty: where the rule
    would leave one so, the file with the smallest hash validates.

    Example:
      >>> sorted(split_files(["a.py", "b.py", "c.py"]))
      ['b.py']
    """
    hashes = {name: int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) for name in names}
    chosen = {name for name, value in hashes.items() if value % VALIDATION_SHARE == 0}
    return chosen if 0 < len(chosen) < len(hashes) else {min(hashes, key=hashes.__getitem__)}


def _standard_library() -> dict[str, bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    return _read(root, [name for name in names if NOT_LIBRARY.isdisjoint(name.parts)])


def _files(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return _read(path.parent, [Path(path.name)])
    if not path.is_dir():
        raise ValueError(f"data must be a file or a folder of text, got {str(path)!r}, which is not there")
    return _read(path, [file.relative_to(path) for file in path.rglob("*") if file.is_file()])


def _read(root: Path, names: list[Path]) -> dict[str, bytes]:
    """The contents of the files that are text, in the order of their names; a NUL byte tells a binary file."""
    contents = {name.as_posix(): (root / name).read_bytes() for name in sorted(names)}
    texts = {name: content for name, content in contents.items() if content.strip() and b"\0" not in content}
    if not texts:
        raise ValueError(f"data must be text, but {str(root)!r} holds none: {len(contents)} files, all empty or binary")
    return texts


def batch(
    text: UInt8[np.ndarray, " bytes"], *, seed: int, step: int, rows: int, window: int, part: Part = ALL
) -> UInt8[np.ndarray, "part window"]:
    """The training batch of one step: windows at random places, which depend on seed and step alone.

    ``part`` tells which of its rows to read; it does not change what they are.
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - window + 1, rows)
    return np.stack([text[start : start + window] for start in starts[part]])


def validation_batches(
    text: UInt8[np.ndarray, " bytes"], *, batches: int, rows: int, window: int, part: Part = ALL
) -> Iterator[UInt8[np.ndarray, "part window"]]:
    """Windows spread evenly over the validation text, the same ones for every run; of each batch the rows ``part``."""
    starts = np.linspace(0, len(text) - window, batches * rows).astype(np.int64)
    for batch_starts in starts.reshape(batches, rows):
        yield np.stack([text[start : start + window] for start in batch_starts[part]])


def unigram_loss(text: Text) -> float:
    """Cross-entropy on the validation bytes, in nats per byte, of a model that knows only how common each byte is.

    The frequencies are those of the training bytes, each count plus one.
    """
    counts = np.bincount(text.train, minlength=256) + 1
    seen = np.bincount(text.validation, minlength=256)
    return float(-(seen * np.log(counts / counts.sum())).sum() / seen.sum())
