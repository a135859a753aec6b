"""kinject recipes styles: what a writer is shown, and one answer with its verdict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kinject.augment.styles import STYLES
from kinject.cli import main
from kinject.recipe import AugmentRecipe
from kinject.types import Completion, Message

Make = Callable[..., AugmentRecipe]
MINE = 'name: mine\nabout: as a letter\nuser: "{{ source }} Write a letter."\n'


def test_every_style_is_listed_with_its_source_and_those_of_a_recipe_too(
    make_recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    recipe = make_recipe()
    assert main(["recipes", "styles"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(STYLES)
    assert (
        main(["recipes", "styles", "--recipe", str(recipe.path), f"augment.style_files=['{tmp_path}/mine.yaml']"]) == 0
    )
    assert "mine                as a letter" in capsys.readouterr().out


def test_the_prompts_are_shown_on_a_passage_of_the_user_with_its_headings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manual = tmp_path / "manual.md"
    manual.write_text(
        "# Pump\n\nThe pump has two valves.\n\n## Care\n\n" + "Clean the filter of the pump each week. " * 40
    )
    assert main(["recipes", "styles", "atomic_facts", "--documents", str(manual), "--passage", "2"]) == 0
    shown = capsys.readouterr().out
    assert "called 'Pump'.\nIt stands under the headings 'Care'.\n\n<passage>\nClean the filter" in shown
    assert "######## preparation: fact, once for each passage" in shown
    assert "(fact)" in shown
    assert main(["recipes", "styles", "plain", "--documents", str(manual), "--passage", "9"]) == 2
    assert f"{manual}: has no passage 9" in capsys.readouterr().err
    assert main(["recipes", "styles", "plane"]) == 2
    assert "plane: unknown style. Did you mean plain?" in capsys.readouterr().err


def test_one_text_is_tried_with_the_recipes_generator_and_nothing_is_stored(
    make_recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(styles={"paraphrase": 50}, judge={"kind": "sandbox"})
    (tmp_path / "mine.yaml").write_text(MINE)
    for style in ("paraphrase", "entigraph", f"{tmp_path}/mine.yaml"):
        assert main(["recipes", "styles", style, "--recipe", str(recipe.path), "--try"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("accepted:\n")
        assert out.endswith("\n2 requests\n" if style == "entigraph" else "\n1 request\n")
    assert not recipe.run_dir.exists()

    def refuse(messages: list[Message], seed: int) -> Completion:
        return Completion("Sorry, I cannot do that.")

    monkeypatch.setattr("kinject.augment.sandbox.generate_answer", refuse)
    assert main(["recipes", "styles", "paraphrase", "--recipe", str(recipe.path), "--try"]) == 1
    assert "refused, refusal: found 'Sorry'\nSorry, I cannot do that.\n" in capsys.readouterr().out
    assert main(["recipes", "styles", "paraphrase", "--try"]) == 2
    assert "--try: needs a generator" in capsys.readouterr().err
