"""kinject as a model of lm-evaluation-harness: equal to the harness's own model on a task of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from kinject.eval import evaluate
from kinject.eval.scoring.answers import read_answers
from kinject.recipe import read_recipe
from small import quick

GOLD = json.loads((Path(__file__).parent / "goldens" / "harness.json").read_text())["tasks"]
"""What lm-evaluation-harness scored, written by its own model of a real checkpoint."""
CHOICES = {
    "task": "mills", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "", "dev": ""}},
    "test_split": "test", "fewshot_split": "dev", "fewshot_config": {"sampler": "first_n"},
    "output_type": "multiple_choice", "description": "On mills.\n\n", "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}", "num_fewshot": 2,
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}  # fmt: skip
WRITTEN = CHOICES | {
    "task": "mills_written", "output_type": "generate_until", "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n", "mill"], "max_gen_toks": 12}, "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip
ROLLING = CHOICES | {
    "task": "mills_texts", "output_type": "loglikelihood_rolling", "doc_to_text": "", "num_fewshot": 0,
    "doc_to_target": "{{long}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
}  # fmt: skip
del WRITTEN["doc_to_choice"], ROLLING["doc_to_choice"]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with the tasks' own YAML and rows, one with empty shots and one text longer than the model's window."""
    rows = [
        {
            "question": f"How many mills has town {i}?", "choices": [f"{i} mills", "none", "a mill and a half"],
            "answer": i % 3, "long": f"The mill of town {i} stands by the river. " * (2 + 8 * (i % 3)),
        }
        for i in range(7)
    ]  # fmt: skip
    for name in ("test", "dev"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("test", "dev")}
    for task in (CHOICES, WRITTEN, ROLLING):
        config = task | {"dataset_kwargs": {"data_files": files}}
        (tmp_path / f"{config['task']}.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


@pytest.mark.filterwarnings("ignore")
def test_the_harness_gets_the_numbers_of_its_own_model_from_kinject(
    tasks: Path, tiny_model: Path
) -> None:
    pytest.importorskip("lm_eval", reason="the package lm_eval is not installed")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import kinject.eval.harness

    assert kinject.eval.harness.KinjectLM

    def run(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = simple_evaluate(
            model, model_args=arguments, tasks=["mills", "mills_written", "mills_texts"], bootstrap_iters=0,
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False), device="cpu",
        )  # fmt: skip
        return result

    ours = run("kinject", {"path": str(tiny_model)})
    theirs = run("hf", {"pretrained": str(tiny_model), "dtype": "float32", "batch_size": 4})
    for mine, other in zip(ours["samples"]["mills"], theirs["samples"]["mills"], strict=True):
        for (a, greedy), (b, other_greedy) in zip(
            mine["filtered_resps"], other["filtered_resps"], strict=True
        ):
            assert float(a) == pytest.approx(float(b), abs=1e-4)
            assert str(greedy) == str(other_greedy)
    for mine, other in zip(
        ours["samples"]["mills_written"], theirs["samples"]["mills_written"], strict=True
    ):
        assert mine["filtered_resps"] == other["filtered_resps"]
    for task, results in theirs["results"].items():
        for name, value in results.items():
            if isinstance(value, float):
                assert ours["results"][task][name] == pytest.approx(value, rel=1e-4), (task, name)


TEMPLATES = {
    "BOS, and a space before the answer": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "no BOS, and a line break": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}",
    "no system turn": "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
}


@pytest.mark.parametrize(
    ("options", "is_refused"),
    [
        ({"repetition_penalty": 1.3, "until": ["."]}, True), ({"no_repeat_ngram_size": 2}, True),
        ({"num_beams": 3}, True), ({"temperature": 0.7}, True),
        ({"repetition_penalty": 1.0, "num_beams": 1, "temperature": 0.0, "top_p": 0.9}, False),
    ],
)  # fmt: skip
def test_settings_of_the_harness_that_would_change_a_text_are_refused(options, is_refused):
    pytest.importorskip("lm_eval", reason="the package lm_eval is not installed")
    from kinject.eval.harness import KinjectLM

    lm = object.__new__(KinjectLM)
    lm._ids = lambda texts: [[1]] * len(texts)
    lm.window, lm.model = 300, SimpleNamespace(generator=SimpleNamespace(score=lambda _: {}))
    with pytest.raises(ValueError if is_refused else KeyError):  # nothing is written here
        lm.generate_until([SimpleNamespace(args=("Who?", options))])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_multiturn", [False, True])
@pytest.mark.parametrize("template", quick(TEMPLATES, "BOS, and a space before the answer"))
def test_chats_of_the_harness_have_the_numbers_of_its_own_model(
    tasks: Path, tiny_model: Path, template: str, is_multiturn: bool
) -> None:
    """Choices and written answers, with examples in one turn or in turns of their own, and a prefix of the answer."""
    pytest.importorskip("lm_eval", reason="the package lm_eval is not installed")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import kinject.eval.harness

    assert kinject.eval.harness.KinjectLM
    (tiny_model / "chat_template.jinja").write_text(TEMPLATES[template])
    prefixed = yaml.safe_load((tasks / "mills.yaml").read_text())
    prefixed |= {"task": "mills_prefixed", "gen_prefix": "The answer is:"}
    (tasks / "mills_prefixed.yaml").write_text(yaml.safe_dump(prefixed))
    names = ["mills", "mills_prefixed", "mills_written"]

    def run(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
        samples: dict[str, Any] = simple_evaluate(
            model, model_args=arguments, tasks=names, bootstrap_iters=0, device="cpu", limit=3,
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            apply_chat_template=True, fewshot_as_multiturn=is_multiturn, system_instruction="Be brief.",
        )["samples"]  # fmt: skip
        return samples

    ours = run("kinject", {"path": str(tiny_model)})
    theirs = run("hf", {"pretrained": str(tiny_model), "dtype": "float32"})
    for name in names[:2]:
        for mine, other in zip(ours[name], theirs[name], strict=True):
            for pair, right in zip(mine["filtered_resps"], other["filtered_resps"], strict=True):
                assert float(pair[0]) == pytest.approx(float(right[0]), abs=1e-4)
    for mine, other in zip(ours["mills_written"], theirs["mills_written"], strict=True):
        assert mine["filtered_resps"] == other["filtered_resps"]


@pytest.mark.parametrize("format", ["letters", "texts"])
def test_mmlu_files_give_the_harness_own_numbers(format: str, shared: Path, tmp_path: Path) -> None:
    mmlu = shared / "data" / "mmlu"
    lines = (mmlu / "anatomy.test.jsonl").read_text().splitlines(keepends=True)[:6]
    (tmp_path / "test.jsonl").write_text("".join(lines))
    section = {
        "models": {"stories": str(shared / "models" / "stories260K")}, "formats": [format], "shots": [1],
        "scores": ["sum", "chars", "bytes"],
        "questions": {"mmlu": {"path": str(tmp_path / "test.jsonl"), "shots_from": str(mmlu / "anatomy.dev.jsonl")}},
    }  # fmt: skip
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        yaml.safe_dump({"run_dir": str(tmp_path / "run"), "eval": {"control": False, **section}})
    )
    report = evaluate(read_recipe(recipe, (), "eval"))
    scored = {
        answer.question_id: answer.log_probs
        for answer in read_answers(tmp_path / "run" / "answers.jsonl")
    }
    assert scored.keys() == GOLD[format]["log_probs"].keys()
    for name, log_probs in GOLD[format]["log_probs"].items():
        np.testing.assert_allclose(scored[name], log_probs, rtol=0, atol=1e-4)
    accuracies = {result.score: result.accuracy for result in report.results}
    for metric, score in (("acc", "sum"), ("acc_norm", "chars"), ("acc_bytes", "bytes")):
        if f"{metric},none" in GOLD[format]["results"] and score in accuracies:
            assert accuracies[score] == pytest.approx(GOLD[format]["results"][f"{metric},none"])
