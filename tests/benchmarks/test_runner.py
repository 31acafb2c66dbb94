from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import runner


def test_a_quick_run_tells_everything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runner, "LAGS", (1,))
    file = tmp_path / "figures.json"
    assert runner.main(["--quick", "--rounds", "2", "--json", str(file)]) == 0
    out, figures = capsys.readouterr().out, json.loads(file.read_text())
    assert "armed, lag 1" in out and "the same plain loop again" in out
    assert figures["overhead"]["lag 1"]["wall"]["rounds"] == 2  # so no quiet round was retried
    assert figures["compiled_for_the_first_overflow"] == {"lag 1": 0}
    found = figures["rejections"]["lag 1"]
    assert found["predicted"] == pytest.approx(found["fallback"] + found["capped"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "1"], "rounds must be an integer of at least 2, got 1"),
        (["--json", "/no/such/file"], "json must be"),
    ],
)
def test_bad_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        runner.main(words)
    assert message in capsys.readouterr().err
