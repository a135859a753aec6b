"""Grades of written answers, kinject's beside lm-evaluation-harness's: exact match and F1 of SQuAD, and three tasks.

    python benchmarks/eval/graders.py [--rows 1000] [--harness PYTHON] [--material FOLDER]

The answers are SQuAD's own, changed: words left out or added, other letters, numbers in sentences. In the harness a model
that writes exactly these answers (harness_writer below) runs three tasks of type generate_until through its own filters and
metrics; exact match and F1 there are those of SQuAD's script in its task qasper. No language model is needed.
`--harness` is a Python that has lm_eval; without it the program prints kinject's side alone.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

WORDS = ("the", "a", "of", "Lowmere", "answer:", "is", "in", "1987", "42", "-", "they", "said", "mill.")
COMMON: dict[str, Any] = {
    "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "test.jsonl"}}, "test_split": "test",
    "output_type": "generate_until", "doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_target": "{{answers}}",
    "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 32},
}  # fmt: skip
MATCH: dict[str, Any] = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
TASKS: dict[str, dict[str, Any]] = {
    "plain": {**COMMON, "metric_list": [{**MATCH, "ignore_case": True, "ignore_punctuation": True}]},
    "numbers": {
        **COMMON, "metric_list": [{**MATCH, "ignore_case": True, "regexes_to_ignore": [",", "\\$", "\\.$"]}],
        "filter_list": [
            {"name": "strict", "filter": [
                {"function": "regex", "regex_pattern": "answer: is (\\-?[0-9\\.\\,]+)"}, {"function": "take_first"}]},
            {"name": "flexible", "filter": [
                {"function": "regex", "group_select": -1, "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)"},
                {"function": "take_first"}]},
        ],
    },
    "lower": {
        **COMMON, "metric_list": [MATCH],
        "filter_list": [{"name": "lower", "filter": [
            {"function": "lowercase"}, {"function": "remove_whitespace"}, {"function": "take_first"}]}],
    },
}  # fmt: skip


def make_rows(material: Path, n: int) -> list[dict[str, Any]]:
    """Return `n` questions of SQuAD, each with accepted answers and a written one."""
    rng = random.Random(0)
    lines = (material / "data/squad/squad2_dev_half_qa.jsonl").read_text().splitlines()
    pool = [row for row in map(json.loads, lines) if row["answers"]]
    rows = []
    for i in range(n):
        row = pool[i % len(pool)]
        gold = rng.choice(row["answers"]) if i % 5 else str(rng.randrange(2000))
        words = [word.upper() if rng.random() < 0.1 else word for word in gold.split() if rng.random() < 0.9]
        extra = rng.choices(WORDS, k=rng.choice((0, 0, 0, 1, 3)))
        text = (
            f"answer: is {gold}."
            if i % 5 == 0 and i % 2
            else " ".join([*extra, *words]) + rng.choice(("", "", ".", " "))
        )
        accepted = [gold] if i % 5 == 0 else row["answers"]
        if i % 3 == 0:
            accepted = [accepted_text.lower() for accepted_text in accepted]
        rows.append({"id": str(i), "question": f"{i}: {row['question']}", "answers": accepted, "text": text})
    return rows


def harness_side(folder: Path) -> None:
    """Write the harness's grades of test.jsonl to harness.json; runs with a Python that has lm_eval."""
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks.qasper.metrics import f1_abstractive, normalize_answer

    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    texts = {f"Question: {row['question']}\nAnswer:": row["text"] for row in rows}

    class HarnessWriter(LM):  # type: ignore[misc]
        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return [texts[request.args[0]] for request in requests]

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = simple_evaluate(
        HarnessWriter(), tasks=list(TASKS), task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    grades: dict[str, dict[str, float]] = {}
    for task, samples in results["samples"].items():
        for sample in samples:
            name = f"{task}, exact_match,{sample['filter']}"
            grades.setdefault(name, {})[sample["doc"]["id"]] = float(sample["exact_match"])
    metrics: dict[str, Callable[[str, str], float]] = {
        "squad exact": lambda text, gold: normalize_answer(text) == normalize_answer(gold),
        "squad f1": lambda text, gold: f1_abstractive([text], [gold]),
    }
    for name, metric in metrics.items():
        grades[name] = {row["id"]: max(float(metric(row["text"], gold)) for gold in row["answers"]) for row in rows}
    (folder / "harness.json").write_text(json.dumps(grades))


def our_side(folder: Path) -> dict[str, dict[str, float]]:
    """Return kinject's grades of test.jsonl: name -> id -> grade."""
    from kinject.corpus.grading import exact_match, f1
    from kinject.eval.tasks.task import read_task
    from kinject.types import Answer

    answer = Answer("", "set", "model", "task-generate", 0, 0, (), 0, (), (1,), ())

    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    grades: dict[str, dict[str, float]] = {}
    for name in TASKS:
        task = read_task(folder / f"{name}.yaml")
        for score, grade in task.graders.items():
            pairs = zip(rows, task.questions, strict=True)
            grades[f"{name}, {score}"] = {
                row["id"]: float(grade(replace(answer, question_id=item.id, text=row["text"], accepted=item.answers)))
                for row, item in pairs
            }
    grades["squad exact"] = {row["id"]: float(exact_match(row["text"], row["answers"])) for row in rows}
    grades["squad f1"] = {row["id"]: f1(row["text"], row["answers"]) for row in rows}
    return grades


def main() -> None:
    """Grade on both sides and print a line for each score."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--harness", default="", help="a Python that has lm_eval")
    parser.add_argument("--material", type=Path, default=Path(__file__).parents[3] / "shared")
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        harness_side(arguments.side)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = make_rows(arguments.material, arguments.rows)
        (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for task, config in TASKS.items():
            data = {"data_files": {"test": str(folder / "test.jsonl")}}
            (folder / f"{task}.yaml").write_text(yaml.safe_dump({"task": task, **config, "dataset_kwargs": data}))
        ours = our_side(folder)
        theirs: dict[str, dict[str, float]] = {}
        if arguments.harness:
            subprocess.run([arguments.harness, __file__, "--side", str(folder)], check=True, cwd=folder)
            theirs = json.loads((folder / "harness.json").read_text())
        for score, grades in ours.items():
            line = f"{score}: mean {sum(grades.values()) / len(grades):.4f} of {len(grades)} rows"
            if theirs:
                largest = max(abs(grades[key] - value) for key, value in theirs[score].items())
                n_same = sum(abs(grades[key] - value) < 1e-12 for key, value in theirs[score].items())
                line += f"; equal to the harness on {n_same}, largest difference {largest:.1e}"
            print(line)


if __name__ == "__main__":
    main()
