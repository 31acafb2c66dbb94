from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.train_lm import data

NAMES = st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=2, max_size=40, unique=True)


@given(NAMES)
def test_neither_part_is_empty(names: list[str]) -> None:
    chosen = data.split_files(names)
    assert chosen < set(names)
    assert chosen


@given(NAMES, st.randoms())
def test_the_split_does_not_depend_on_the_order(names: list[str], random: object) -> None:
    shuffled = list(names)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert data.split_files(shuffled) == data.split_files(names)


def test_a_new_file_moves_no_other_file() -> None:
    names = [f"{i}.py" for i in range(200)]
    before = data.split_files(names)
    assert data.split_files([*names, "new.py"]) - {"new.py"} == before
    assert 10 <= len(before) <= 30  # one in ten, of 200: 20 +- 2.4 standard deviations


def folder(root: Path, files: dict[str, bytes]) -> str:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return str(root)


def test_a_folder_is_split_by_file(tmp_path: Path) -> None:
    files = {f"sub{i % 3}/{i:02}.txt": bytes([65 + i]) * 50 for i in range(26)}
    text = data.load(folder(tmp_path, files), window=10)
    train, validation = set(text.train.tolist()) - {10}, set(text.validation.tolist()) - {10}  # 10 joins the files
    assert not train & validation
    assert train | validation == {content[0] for content in files.values()}
    assert {chr(byte) for byte in validation} == {chr(files[name][0]) for name in data.split_files(list(files))}
    assert "26 files" in text.source


def test_one_file_is_split_by_position(tmp_path: Path) -> None:
    content = bytes(range(1, 201))
    text = data.load(str(Path(folder(tmp_path, {"a.txt": content})) / "a.txt"), window=10)
    assert text.train.tobytes() + text.validation.tobytes() == content
    assert len(text.validation) == 20
    assert "its last tenth for validation" in text.source


def test_binary_and_empty_files_are_no_text(tmp_path: Path) -> None:
    path = folder(tmp_path, {"a.txt": b"a" * 99, "b.txt": b"b" * 99, "c.bin": b"\0c" * 99, "d.txt": b" \n"})
    text = data.load(path, window=10)
    assert set(text.train.tolist()) | set(text.validation.tolist()) == {97, 98}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "data must be text, but .* holds none: 0 files"),
        ({"a": b"", "b": b"\0"}, "holds none: 2 files, all empty or binary"),
        ({"a": b"x" * 30}, r"too little text: 27 bytes to train on and 3 for validation \(one file.*sequence takes 10"),
        ({"a": b"x" * 30, "b": b"y"}, "too little text"),
    ],
)
def test_too_little_text_is_an_error(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data.load(folder(tmp_path, files), window=10)


def test_a_missing_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data must be a file or a folder of text, got .*gone.* not there"):
        data.load(str(tmp_path / "gone"), window=10)


def test_the_default_is_the_standard_library_without_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {"os.py": b"import os\n" * 9, "json/tool.py": b"import json\n" * 9}
    other = {f"{name}/x.py": b"@" * 99 for name in ("site-packages/pip", "test", "unittest/test", "idlelib/idle_test")}
    path = folder(tmp_path, {**files, **other, "README.txt": b"@" * 99})
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": path}.__getitem__)
    text = data.load(None, window=10)
    assert b"@" not in text.train.tobytes() + text.validation.tobytes()
    assert len(text.train) + len(text.validation) == sum(map(len, files.values()))


def test_this_interpreter_has_megabytes_of_it() -> None:
    text = data.load(None, window=1000)
    assert len(text.train) > 5_000_000
    assert len(text.validation) > 200_000


def test_batches_depend_on_seed_and_step_alone() -> None:
    text = np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8)

    def batch(seed: int, step: int) -> bytes:
        return data.batch(text, seed=seed, step=step, rows=4, window=33).tobytes()

    forward = [batch(0, step) for step in range(5)]
    assert [batch(0, step) for step in reversed(range(5))] == forward[::-1]  # as after a restart in the middle
    assert len({*forward, batch(1, 0), batch(1, 1)}) == 7


def test_a_part_is_those_rows_of_the_whole() -> None:
    text, part = np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8), np.array([1, 4])
    whole, own = (data.batch(text, seed=0, step=3, rows=6, window=33, part=p) for p in (data.ALL, part))
    np.testing.assert_array_equal(own, whole[part])
    wholes, owns = (data.validation_batches(text, batches=2, rows=6, window=33, part=p) for p in (data.ALL, part))
    for whole, own in zip(wholes, owns, strict=True):
        np.testing.assert_array_equal(own, whole[part])


def test_windows_come_from_the_whole_text() -> None:
    text = np.arange(11, dtype=np.uint8)
    rows = data.batch(text, seed=0, step=0, rows=200, window=10)
    assert {tuple(row) for row in rows} == {tuple(range(10)), tuple(range(1, 11))}
    [even] = data.validation_batches(text, batches=1, rows=2, window=10)
    assert even.tolist() == [list(range(10)), list(range(1, 11))]


def test_unigram_loss_by_hand() -> None:
    text = data.Text(np.frombuffer(b"aab", np.uint8), np.frombuffer(b"ac", np.uint8), "")
    assert data.unigram_loss(text) == pytest.approx(-(math.log(3 / 259) + math.log(1 / 259)) / 2, rel=1e-12)
