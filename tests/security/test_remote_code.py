"""No code that comes with a model is run: its folder is refused, or read without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kinject.cli import main
from kinject.errors import InputError, RecipeError
from kinject.models import load_model, load_tokenizer
from kinject.recipe import read_recipe


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    """What the code of a folder makes when it is run."""
    return tmp_path / "sprung"


def arm(folder: Path, sprung: Path, model_type: str | None = None) -> None:
    """Give a model folder code of its own for config, model and tokenizer; with `model_type`, nothing else fits it."""
    names = ("modeling_evil", "configuration_evil", "tokenization_evil", "generate", "evil")
    for name in names:
        (folder / f"{name}.py").write_text(
            f"import os\nos.makedirs({str(sprung)!r})\nclass Evil: pass\n"
        )
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(
        f"import os\nos.makedirs({str(sprung)!r})\n"
    )
    for file, named in (
        (
            "config.json",
            {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"},
        ),
        (
            "tokenizer_config.json",
            {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]},
        ),
    ):
        values = json.loads((folder / file).read_text()) | {"auto_map": named}
        if model_type:
            values |= {
                "model_type": model_type,
                "tokenizer_class": "EvilTokenizer",
                "architectures": ["Evil"],
            }
        (folder / file).write_text(json.dumps(values))


@pytest.mark.parametrize("model_type", ["evil", None], ids=["unknown", "of transformers"])
def test_a_folder_with_its_own_code_is_refused_in_one_clear_line(
    tiny_model: Path, sprung: Path, model_type: str | None
) -> None:
    arm(tiny_model, sprung, model_type)
    for load in (
        (load_model, load_tokenizer) if model_type else (load_model,)
    ):  # a known tokenizer is read without its code
        with pytest.raises(InputError) as caught:
            load(str(tiny_model))
        assert "\n" not in str(caught.value)
        assert "kinject runs no code that comes with a model" in str(caught.value)
        assert "trust_remote_code=True" not in str(
            caught.value
        )  # advice that kinject does not take
    assert not sprung.exists()


@pytest.mark.parametrize(
    "trainer", ["{fp16: true, max_steps: 1}", "{lr_scheduler_type: noam, max_steps: 1}"]
)
def test_no_verb_runs_or_asks_about_such_code(
    tiny_model: Path, sprung: Path, write: Callable[..., Path], write_rows: Callable[..., Path], trainer: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    arm(tiny_model, sprung, "evil")

    def no_question(*_: object) -> str:
        raise AssertionError("transformers asks whether to run the code")

    monkeypatch.setattr("builtins.input", no_question)
    rows = write_rows("corpus.jsonl", [{"text": "Arden was born in Lowmere."}])
    questions = write_rows(
        "questions.jsonl",
        [{"id": "q", "question": "Where?", "choices": ["a", "b"], "answer": 0, "subject": "s"}],
    )
    folder = tiny_model.parent
    recipe = write(
        "recipe.yaml",
        f"""run_dir: {folder}/run
model: {{path: {tiny_model}, device: cpu}}
corpus: {{path: {rows}, cache_dir: {folder}/tokens}}
trainer: {trainer}
eval: {{models: {{base: {tiny_model}}}, questions: {{set: {questions}}}}}
augment: {{documents: {rows}, styles: {{paraphrase: 1}}, generator: {{kind: transformers, model: {tiny_model}}}}}
""",
    )
    for verb in (["train"], ["eval"], ["augment"], ["plan", "--no-calibration"]):
        assert main([verb[0], str(recipe), *verb[1:]]) == 2, verb
        told = capsys.readouterr().err
        assert "Traceback" not in told
        assert (
            "kinject runs no code that comes with a model" in told
            or "trust_remote_code" not in told
        ), verb
    assert main(["export", str(tiny_model), "--average-with", str(tiny_model)]) in (
        0,
        2,
    )  # averages tensors, loads no model
    assert not sprung.exists()


@pytest.mark.parametrize(
    "where", ["trainer.trust_remote_code", "model.trust_remote_code", "eval.trust_remote_code"]
)
def test_a_recipe_cannot_switch_it_on(write: Callable[..., Path], where: str) -> None:
    recipe = write("recipe.yaml", "run_dir: run\ntrainer: {max_steps: 1}\n")
    with pytest.raises(RecipeError, match="trust_remote_code"):
        read_recipe(recipe, [f"{where}=true"])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.__class__.__init__.__globals__ }}",
    ],
)
def test_a_template_reaches_nothing_behind_its_values(template: str, tiny_tokenizer: Any) -> None:
    from jinja2.exceptions import SecurityError, UndefinedError

    tiny_tokenizer.chat_template = template
    with pytest.raises((SecurityError, UndefinedError)):
        tiny_tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
