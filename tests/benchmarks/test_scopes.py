from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import scopes


def test_a_quick_run_tells_everything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scopes, "RATES", (0.0, 0.5))
    monkeypatch.setattr(scopes, "QUICK_STEPS", 4)
    file = tmp_path / "figures.json"
    assert scopes.main(["--quick", "--json", str(file)]) == 0
    out, figures = capsys.readouterr().out, json.loads(file.read_text())
    assert "dropless: layer" in out and "0.620 of dropless" in out
    rates = figures["rates"]
    assert rates["0"]["attempts"] == dict.fromkeys(scopes.POLICIES, 4)
    assert rates["0.5"]["attempts"] == {"dropless": 4, "drop": 4, "step": 6, "layer": 4}
    assert rates["0.5"]["overflows"] == {"dropless": 0, "drop": 2, "step": 2, "layer": 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--rounds", "0"], "rounds must be an integer of at least 1, got 0"), (["--json", "/no/such/file"], "json must")],
)
def test_bad_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        scopes.main(words)
    assert message in capsys.readouterr().err
