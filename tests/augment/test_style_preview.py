"""kinject recipes styles: what a writer is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinject.augment.styles import STYLES
from kinject.cli import main


def test_every_style_is_listed_and_its_prompts_are_shown_on_a_passage_with_its_headings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", "styles"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(STYLES)
    manual = tmp_path / "manual.md"
    manual.write_text("# Pump\n\n## Care\n\n" + "Clean the filter of the pump each week. " * 40)
    (tmp_path / "mine.yaml").write_text(
        'name: mine\nabout: a\nuser: "{{ source }} Write a letter."\n'
    )
    for style, wanted in (
        ("atomic_facts", "######## preparation: fact, once for each passage"),
        ("mine.yaml", "a letter."),
    ):
        name = str(tmp_path / style) if "." in style else style
        assert main(["recipes", "styles", name, "--documents", str(manual)]) == 0
        shown = capsys.readouterr().out
        assert "called 'Pump'.\n" in shown
        assert "<passage>\n# Pump\n\n## Care" in shown
        assert wanted in shown
    assert main(["recipes", "styles", "plane"]) == 2
    assert "plane: unknown style. Did you mean plain?" in capsys.readouterr().err
