"""Whole process against whole process: kinject eval and lm-evaluation-harness's hf backend on the same questions.

    python benchmarks/eval/generation.py [--way written|letters|texts] [--questions 100] [--model MODEL]
                                         [--harness PYTHON] [--batch 1] [--material FOLDER]

A Llama of 51 million parameters with random weights and GPT-2's tokenizer is made, or a real model is read with --model,
in float32. `written` are answers of 32 tokens to SQuAD questions after 5 examples, `letters` MMLU with 5 examples, `texts`
MMLU's option texts without. `--harness` is a Python that has lm_eval, `--batch` the harness's batch size. Both times count
everything: start, imports, loading, files. Processor time is shown too, since a busy machine stretches the other.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from figures import Times, make_model, model_folder, read_subjects, task_config

TASK: dict[str, Any] = {
    "task": "squad_written", "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "test.jsonl", "dev": "dev.jsonl"}}, "test_split": "test",
    "fewshot_split": "dev", "fewshot_config": {"sampler": "first_n"}, "output_type": "generate_until",
    "doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_target": "{{answers}}",
    "generation_kwargs": {"until": ["\n\n\n\n"], "do_sample": False, "max_gen_toks": 32},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
MOST_SHOTS = 5
SHOTS = {"written": 5, "letters": 5, "texts": 0}
KINJECT = "import sys; from kinject.cli import main; sys.exit(main(['eval', 'recipe.yaml']))"


def measure(words: list[str], folder: Path, threads: int, **variables: str) -> Times:
    """Run a process to its end, with `variables` in its environment; return its seconds, and those of its processors."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **variables}
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            words, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        raise SystemExit((folder / "log").read_text()[-3000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Times(time.perf_counter() - began, cpu)


def write_files(folder: Path, material: Path, n: int, way: str) -> list[str]:
    """Write the tasks, their questions and examples, and kinject's recipe to `folder`; return the names of the tasks."""
    section: dict[str, Any] = {"models": {"m": "model"}, "formats": [way], "shots": [SHOTS[way]]}
    if way == "written":
        section |= {"formats": ["generate"], "scores": ["exact"], "stop": ["\n\n\n\n"]}
        tasks = {"squad_written": TASK}
        files = {"squad_written": write_squad(folder, material, n)}
    else:
        subjects = read_subjects(material / "data" / "mmlu", 5, -(-n // 5), folder)
        files = {subject: (test, dev) for subject, (_, _, test, dev) in subjects.items()}
        tasks = {
            subject: task_config(subject, subject, way, *files[subject]) for subject in subjects
        }
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    section["questions"] = {
        name: {"path": str(test), "shots_from": str(dev.resolve())}
        for name, (test, dev) in files.items()
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"run_dir": "run", "eval": section}))
    return list(tasks)


def write_squad(folder: Path, material: Path, n: int) -> tuple[Path, Path]:
    """Write `n` questions of SQuAD and the examples to `folder`; return both files."""
    rows = [
        json.loads(line)
        for line in (material / "data/squad/squad2_dev_half_qa.jsonl").read_text().splitlines()
    ]
    rows = [
        {"id": row["id"], "question": row["question"], "answers": row["answers"]}
        for row in rows
        if row["answers"]
    ]
    step = max(1, len(rows) // (n + MOST_SHOTS))
    dev, test = rows[: MOST_SHOTS * step : step], rows[MOST_SHOTS * step :: step][:n]
    for name, part in (("dev", dev), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder / "test.jsonl", folder / "dev.jsonl"


def harness_answers(folder: Path, way: str) -> dict[str, Any]:
    """Return the harness's text, or log-prob of each choice, by question."""
    rows = [
        json.loads(line)
        for path in (folder / "harness").rglob("samples_*.jsonl")
        for line in path.read_text().splitlines()
    ]
    if way == "written":
        return {row["doc"]["id"]: row["resps"][0][0] for row in rows}
    return {
        row["doc"]["id"]: [float(answer[0]) for answer in row["filtered_resps"]] for row in rows
    }


def comparison(ours: dict[str, Any], theirs: dict[str, Any], way: str) -> str:
    """Return how many answers are the same, and how far log-probs differ."""
    pairs = [(ours[key], answer) for key, answer in theirs.items()]
    if way == "written":
        return f"same texts {sum(a == b for a, b in pairs)} of {len(pairs)}"
    same = sum(a.index(max(a)) == b.index(max(b)) for a, b in pairs)
    gap = max(abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True))
    return f"same choice {same} of {len(pairs)}; largest difference of a log-probability {gap:.1e}"


def main() -> None:
    """Run both sides and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=SHOTS, default="written")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument(
        "--model", type=Path, help="a folder or a GGUF file, instead of the model that is made"
    )
    parser.add_argument("--harness", default="", help="a Python that has lm_eval")
    parser.add_argument("--batch", default="1", help="batch size of the harness")
    parser.add_argument("--material", type=Path, default=Path(__file__).parents[3] / "shared")
    parser.add_argument("--layers", type=int, default=8, help="of the model; 8 make 51M parameters")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.model:
            (folder / "model").symlink_to(model_folder(arguments.model))
        else:
            make_model(
                folder / "model",
                arguments.material / "models" / "tokenizers" / "gpt2",
                arguments.layers,
            )
        tasks = write_files(folder, arguments.material, arguments.questions, arguments.way)
        print(
            f"{arguments.model or '51M parameters'}, {arguments.way}, {SHOTS[arguments.way]} shots",
            flush=True,
        )
        ours = measure([sys.executable, "-c", KINJECT], folder, arguments.threads)
        rows = [
            json.loads(line) for line in (folder / "run" / "answers.jsonl").read_text().splitlines()
        ]
        answers = {
            row["question_id"]: row["text" if arguments.way == "written" else "log_probs"]
            for row in rows
        }
        n = len(answers)
        print(
            f"kinject: {ours.wall:.1f} s, {ours.cpu:.1f} s of processor time, {n / ours.wall:.2f} a second",
            flush=True,
        )
        if not arguments.harness:
            return
        task = [
            arguments.harness,
            "-m",
            "lm_eval",
            "--model",
            "hf",
            "--model_args",
            "pretrained=model,dtype=float32",
        ]
        task += [
            "--device",
            "cpu",
            "--tasks",
            ",".join(f"{name}.yaml" for name in tasks),
            "--num_fewshot",
            str(SHOTS[arguments.way]),
            "--batch_size",
            arguments.batch,
        ]
        theirs = measure(
            [*task, "--output_path", "harness", "--log_samples"],
            folder,
            arguments.threads,
            HF_HUB_OFFLINE="1",
        )
        print(
            f"lm-evaluation-harness, batch {arguments.batch}: {theirs.wall:.1f} s, {theirs.cpu:.1f} s of processor time; "
            f"{theirs.wall / ours.wall:.1f} times, of processor time {theirs.cpu / ours.cpu:.1f} times; "
            f"{comparison(answers, harness_answers(folder, arguments.way), arguments.way)}"
        )


if __name__ == "__main__":
    main()
