"""lm-evaluation-harness's tasks read as they are, its result files written and read, against its own numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from kinject.errors import InputError
from kinject.eval import evaluate
from kinject.eval.harness_files import read_samples
from kinject.eval.plan import EvalArm, QuestionSet
from kinject.eval.prompts import ChatStyle, render_prompt
from kinject.eval.run import preview
from kinject.eval.scoring.answers import read_answers
from kinject.eval.scoring.encode import Encoder
from kinject.eval.tasks.task import read_task
from kinject.recipe import read_recipe
from kinject.types import Answer

GOLD = json.loads((Path(__file__).parents[1] / "goldens" / "harness.json").read_text())
TASKS = json.loads((Path(__file__).parents[1] / "goldens" / "tasks.json").read_text(encoding="utf-8"))
BASE = """\
dataset_path: json
dataset_kwargs: {data_files: {test: test.jsonl, dev: dev.jsonl}}
test_split: test
fewshot_split: dev
fewshot_config: {sampler: first_n}
output_type: multiple_choice
doc_to_text: "{{question.strip()}}\\nA. {{choices[0]}}\\nB. {{choices[1]}}\\nC. {{choices[2]}}\\nD. {{choices[3]}}\\nAnswer:"
doc_to_choice: ["A", "B", "C", "D"]
doc_to_target: answer
"""
LETTERS = """\
include: base.yaml
task: gold_letters
description: "The following are multiple choice questions (with answers) about anatomy.\\n\\n"
"""
TEXTS = """\
include: base.yaml
task: gold_texts
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
"""


@pytest.fixture
def answered(shared, tmp_path, write):
    """The run folder of a real checkpoint on both tasks, one shot."""
    mmlu = shared / "data" / "mmlu"
    lines = (mmlu / "anatomy.test.jsonl").read_text().splitlines(keepends=True)
    write("test.jsonl", "".join(lines[:6]))
    write("dev.jsonl", (mmlu / "anatomy.dev.jsonl").read_text())
    write("base.yaml", BASE)
    tasks = {"letters": str(write("letters.yaml", LETTERS)), "texts": str(write("texts.yaml", TEXTS))}
    section = {
        "models": {"stories": str(shared / "models" / "stories260K")}, "questions": tasks, "shots": [1],
        "scores": ["sum", "chars", "bytes"],
    }  # fmt: skip
    recipe = write("recipe.yaml", yaml.safe_dump({"run_dir": str(tmp_path / "run"), "eval": section}))
    return evaluate(read_recipe(recipe, (), "eval")), tmp_path / "run"


def test_a_task_read_as_it_is_gives_the_harness_own_numbers(answered):
    report, run_dir = answered
    answers = read_answers(run_dir / "answers.jsonl")
    for task, gold in GOLD["tasks"].items():
        scored = {a.question_id: a.log_probs for a in answers if a.question_set == task}
        assert scored.keys() == gold["log_probs"].keys()
        for name, log_probs in gold["log_probs"].items():
            np.testing.assert_allclose(scored[name], log_probs, rtol=0, atol=1e-4)
        accuracies = {result.score: result.accuracy for result in report.results if result.question_set == task}
        for metric, score in (("acc", "sum"), ("acc_norm", "chars"), ("acc_bytes", "bytes")):
            if f"{metric},none" in gold["results"]:
                assert accuracies[score] == pytest.approx(gold["results"][f"{metric},none"])


def test_result_files_have_the_harness_layout_and_numbers(answered):
    _, run_dir = answered
    folder = run_dir / "harness" / "stories"
    (results,) = folder.glob("results_*.json")
    whole = json.loads(results.read_text())
    assert {"results", "configs", "versions", "n-shot", "n-samples", "higher_is_better"} <= whole.keys()
    assert {"results", "configs", "versions", "n-shot", "n-samples", "higher_is_better"} <= set(GOLD["results_keys"])
    gold = GOLD["tasks"]["texts"]["results"]
    written = whole["results"]["texts_task_1shot"]
    for key in ("acc,none", "acc_norm,none", "acc_stderr,none"):
        assert written[key] == pytest.approx(gold[key])
    (samples,) = folder.glob("samples_texts_task_1shot_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert set(GOLD["sample_keys"]) - {"acc_norm", "acc_bytes"} <= rows[0].keys()
    by_id = {answer.question_id: answer for answer in read_samples(samples)}
    for name, log_probs in GOLD["tasks"]["texts"]["log_probs"].items():
        np.testing.assert_allclose(by_id[name].log_probs, log_probs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", TASKS["tasks"])
def test_a_task_asks_what_the_harness_asks(name, write):
    for file, text in TASKS["files"].items():
        write(file, text)
    read = read_task(write("task.yaml", yaml.safe_dump(TASKS["tasks"][name], sort_keys=False)))
    whole = QuestionSet("set", "learning", read.questions, read.pool, (), read)
    asks = list(whole.requests(EvalArm("m", "task", TASKS["shots"][name], 0)))
    assert len(asks) == len(TASKS["asked"][name])
    for (request, _), gold in zip(asks, TASKS["asked"][name], strict=True):
        prompt = render_prompt(request)
        assert (prompt.context, list(prompt.continuations)) == (gold["context"], gold["continuations"])
        assert request.question.answer == gold["target"]
    names = [question.id for question in read.questions]
    assert len(set(names)) == len(names)
    first = TASKS["asked"][name][0]
    assert names[0] == (first["id"] or first["hash"])  # so that compare finds the same question in samples


def task(write, **change):
    rows = [{"id": "a", "stem": "Who?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": " B"}]
    write("q.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    whole = {
        "task": "t", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "q.jsonl"}},
        "output_type": "multiple_choice", "test_split": "test", "doc_to_text": "stem",
        "doc_to_target": "{{choices.label.index(answerKey.lstrip())}}", "doc_to_choice": "{{choices.text}}", **change,
    }  # fmt: skip
    return write("task.yaml", yaml.safe_dump(whole))


def test_openbookqas_fields_are_read(write):
    (question,) = read_task(task(write)).questions
    assert (question.id, question.question, question.choices, question.answer) == ("a", "Who?", ("x", "y"), 1)


def test_a_function_is_refused_and_not_run(write):
    path = write("task.yaml", "output_type: multiple_choice\ntask: t\ndoc_to_text: !function utils.text\n")
    with pytest.raises(InputError, match=r"task\.yaml:3: !function names Python code, which kinject does not run"):
        read_task(path)


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.getcwd []", "!!python/name:os.getcwd"])
def test_yaml_that_makes_python_objects_is_refused(write, tag):
    with pytest.raises(InputError, match="not YAML"):
        read_task(write("task.yaml", f"task: {tag}\n"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_type": "loglikelihood"}, "output_type: found 'loglikelihood', kinject reads multiple_choice"),
        ({"output_type": "generate_until"}, "doc_to_choice: not read for generate_until"),
        (
            {"output_type": "generate_until", "doc_to_choice": None, "generation_kwargs": {"do_sample": True}},
            "asks for samples",
        ),
        (
            {
                "output_type": "generate_until",
                "doc_to_choice": None,
                "filter_list": [{"name": "x", "filter": [{"function": "custom"}]}],
            },
            "filter_list: found 'custom', kinject has regex",
        ),
        (
            {
                "output_type": "generate_until",
                "doc_to_choice": None,
                "filter_list": [{"name": "x", "filter": [{"function": "multi_choice_regex"}]}],
            },
            "multi_choice_regex reads the column choices, a list of texts; found {'text'",
        ),
        ({"gen_prefix": "{{nothing}}"}, "question 0: gen_prefix: '{{nothing}}' cannot be rendered"),
        ({"gen_prefix": ""}, "question 0: gen_prefix: gives '', expected a text"),
        ({"process_docs": "x"}, "process_docs: not among the task keys"),
        ({"dataset_kwargs": {}}, "no local files for the split 'test'"),
        ({"doc_to_text": "{{nothing}}"}, "question 0: doc_to_text: '{{nothing}}' cannot be rendered"),
        ({"doc_to_text": "{{''.__class__.__mro__}}"}, "cannot be rendered"),
        ({"doc_to_target": "z"}, "neither an index nor one of the choices"),
        ({"doc_to_target": 4}, "found 4, but there are 2 choices"),
        ({"doc_to_choice": "{{stem}}"}, "which is not a list"),
        ({"doc_to_choice": [True, False]}, "found the choice True, expected texts. Numbers and words need quotes"),
        ({"doc_to_target": "{{[0, 1]}}"}, "neither an index nor one of the choices"),
        ({"doc_to_text": "{{1}}"}, "doc_to_text: gives '1', expected the question's text"),
        ({"description": "{{nothing}}"}, "question 0: description: '{{nothing}}' cannot be rendered"),
        ({"fewshot_config": {"sampler": "balanced"}}, "sampler: found 'balanced', kinject has default and first_n"),
        ({"fewshot_config": {"doc_to_text": "x"}}, "kinject reads sampler and split"),
        ({"repeats": 2}, "repeats: found 2"),
        ({"filter_list": [{"name": "x"}]}, "filter_list: kinject filters only what a model writes"),
        ({"task": ["a", "b"]}, "a group of tasks"),
        ({"dataset_kwargs": {"field": "data"}}, "dataset_kwargs: field: not read"),
    ],
)
def test_what_cannot_be_read_is_told(write, change, message):
    with pytest.raises(InputError) as error:
        read_task(task(write, **change))
    assert message in str(error.value)


def test_what_a_task_wants_and_does_not_get_is_noted(write):
    read = read_task(task(write, num_fewshot=5, metric_list=[{"metric": "acc"}, {"metric": "f1"}]))
    assert [note.split(": ", 1)[1] for note in read.notes] == [
        "f1: not computed; kinject has acc, acc_norm, acc_bytes (eval.scores)",
        "num_fewshot: 5 is not followed; eval.shots sets the number of examples",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "eval.shots asks for 2 examples, but the task names no split to take them from"),
        ({"fewshot_split": "dev"}, "the task names no local files for the split 'dev' to take them from"),
        ({"fewshot_split": "test"}, "eval.shots asks for 2 examples, but 1 are there"),
    ],
)
def test_examples_that_are_not_there_are_told(write, change, message):
    with pytest.raises(InputError) as error:
        read_task(task(write, **change)).examples(2)
    assert message in str(error.value)


def test_a_file_that_includes_itself_is_told(write):
    with pytest.raises(InputError, match="includes itself"):
        read_task(write("task.yaml", "include: task.yaml\n"))


CSV = "question,a,b,c,d,gold\nWho?,007,1.50,NA,x,2\nWhat?,1,2,3,4,0\n"


def csv_task(write, text, name="q.csv", **change):
    write(name, text)
    return task(
        write, dataset_path="csv", dataset_kwargs={"data_files": {"test": name}}, doc_to_text="question",
        doc_to_choice="{{[a, b, c, d]}}", doc_to_target="gold", **change,
    )  # fmt: skip


def test_the_texts_of_a_csv_stay_as_they_are_written(write):
    first, second = read_task(csv_task(write, CSV)).questions
    assert (first.choices, first.answer, second.answer) == (("007", "1.50", "NA", "x"), 2, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CSV.replace("Who?", '"Who?'), "q.csv:2: not CSV: a quote opened here"),
        (CSV.replace("2,3,4", "3,4"), "q.csv:3: found 5 cells, the header has 6"),
        (CSV.replace("b,c", "a,c"), "q.csv:1: two columns are called 'a'"),
        (CSV.replace("2,3,4", "2,2,4"), "q.csv:3: "),
        (CSV + "Who?,007,1.50,NA,x,3\n", "q.csv:4: "),
    ],
)
def test_a_csv_of_a_task_is_read_as_strictly_as_documents_are(write, text, message):
    with pytest.raises(InputError) as error:
        read_task(csv_task(write, text))
    assert message in str(error.value)


def test_labels_that_do_not_name_one_text_each_are_refused(write):
    path = task(write)
    rows = {"id": "a", "stem": "Who?", "choices": {"text": ["x", "y"], "label": ["A", "A"]}, "answerKey": "A"}
    write("q.jsonl", json.dumps(rows) + "\n")
    with pytest.raises(InputError, match=r"q\.jsonl:1: .*choices: the label 'A' is there twice"):
        read_task(path)


def test_a_key_that_is_twice_in_a_task_is_told(write):
    with pytest.raises(InputError, match=r"task\.yaml:1: the key 'task' is there twice\. Keep one\."):
        read_task(write("task.yaml", "task: a\ntask: b\n"))


def test_a_question_with_another_gold_among_the_examples_is_told(write):
    path = csv_task(write, CSV, fewshot_split="dev")
    config = yaml.safe_load(path.read_text())
    config["dataset_kwargs"]["data_files"]["dev"] = "dev.csv"
    write("dev.csv", CSV.replace("x,2", "x,1"))
    with pytest.raises(InputError, match=r"dev\.csv:2: .*answer: '1\.50', but 'NA' at .*q\.csv:2, where"):
        read_task(write("task.yaml", yaml.safe_dump(config)))


@pytest.mark.parametrize("name", TASKS["graded"])
def test_tasks_of_written_answers_are_asked_and_graded_as_by_the_harness(write, name):
    for file, text in TASKS["files"].items():
        write(file, text)
    task = read_task(write(f"{name}.yaml", yaml.safe_dump(TASKS["written"][name])))
    question_set = QuestionSet(name, "learning", task.questions, task.pool, (), task, generation=task.generation)
    arm = EvalArm("base", "task-generate", TASKS["shots"][name], 0)
    requests = [request for request, _ in question_set.requests(arm)]
    graded = TASKS["graded"][name]
    assert {f"exact_match,{row['filter']}" for row in graded} == set(task.graders)
    assert len(graded) == len(requests) * len(task.graders)
    for row in graded:
        request = requests[row["doc"]]
        assert render_prompt(request).context == row["context"]
        assert list(request.generation.stop) == row["kwargs"]["until"]
        assert request.generation.max_new_tokens == row["kwargs"].get("max_gen_toks", 256)
        grade, question = task.graders[f"exact_match,{row['filter']}"], request.question
        answer = Answer(question.id, name, "base", "task-generate", 0, 0, (), 0, (), (1,), (), text=row["text"],
                        accepted=question.accepted)  # fmt: skip
        assert grade(answer) == bool(row["correct"]), row
    assert {bool(row["correct"]) for row in graded} == {True, False}


@pytest.mark.parametrize("name", TASKS["chats"])
def test_a_task_that_begins_the_answer_begins_it_in_a_chat_as_in_the_harness(write, name):
    for file, text in TASKS["files"].items():
        write(file, text)
    name, multiturn = name.split(", multiturn ")
    config = (TASKS["tasks"] | TASKS["written"])[name]
    task = read_task(write("task.yaml", yaml.safe_dump(config)))
    form = "task" if task.generation is None else "task-generate"
    question_set = QuestionSet(name, "learning", task.questions, task.pool, (), task)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")), chat_template=TASKS["chat_template"]
    )
    encoder = Encoder(tokenizer, chat=ChatStyle("Be brief.", multiturn=multiturn == "True"))
    rendered = [
        encoder.apply_chat_template(render_prompt(request))
        for request, _ in question_set.requests(EvalArm("m", form, TASKS["shots"][name], 0))
    ]
    expected = TASKS["chats"][f"{name}, multiturn {multiturn}"]
    for prompt, gold in zip(rendered, expected, strict=False):
        assert prompt.context == gold["context"]
        assert form == "task-generate" or list(prompt.continuations) == gold["continuations"]
    assert len(expected) == 8


def test_a_beginning_that_a_chat_endpoint_would_not_continue_is_refused(write, tmp_path):
    for file, text in TASKS["files"].items():
        write(file, text)
    path = write("task.yaml", yaml.safe_dump(TASKS["written"]["mmlu_flan"]))
    table = {"endpoint": {"base_url": "http://127.0.0.1:9/v1", "model": "m"}, "api": "chat"}
    section = {"models": {"served": table}, "questions": {"flan": str(path)}, "formats": ["generate"], "shots": [0]}
    recipe = write("recipe.yaml", yaml.safe_dump({"run_dir": str(tmp_path / "run"), "eval": section}))
    with pytest.raises(
        InputError, match=r"eval\.models\.served\.api: chat: a task begins the model's answer \(gen_prefix"
    ):
        list(preview(read_recipe(recipe, (), "eval")))
