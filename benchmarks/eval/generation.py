"""Written answers, whole process against whole process: kinject eval and lm-evaluation-harness's hf backend on one task.

    python benchmarks/eval/generation.py [--questions 100] [--harness PYTHON] [--batch 1] [--material FOLDER]

A Llama of 51 million parameters with random weights and GPT-2's tokenizer answers SQuAD questions after 5 examples, 32
tokens each, in float32. Both read the same task file of type generate_until. `--harness` is a Python that has lm_eval,
`--batch` the harness's batch size. Both times count everything: start, imports, loading, files. Processor time is shown
too, since a busy machine stretches the other.
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
from figures import Times, make_model

TASK: dict[str, Any] = {
    "task": "squad_written", "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "test.jsonl", "dev": "dev.jsonl"}}, "test_split": "test",
    "fewshot_split": "dev", "fewshot_config": {"sampler": "first_n"}, "output_type": "generate_until",
    "doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_target": "{{answers}}",
    "generation_kwargs": {"until": ["\n\n\n\n"], "do_sample": False, "max_gen_toks": 32},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
MOST_SHOTS = 5
KINJECT = "import sys; from kinject.cli import main; sys.exit(main(['eval', 'recipe.yaml']))"


def measure(words: list[str], folder: Path, threads: int, **variables: str) -> Times:
    """Run a process to its end, with `variables` in its environment; return its seconds, and those of its processors."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **variables}
    with (folder / "log").open("w") as log:
        done = subprocess.run(words, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit((folder / "log").read_text()[-3000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Times(time.perf_counter() - began, cpu)


def write_files(folder: Path, material: Path, n: int) -> None:
    """Write the task, its questions and examples, and kinject's recipe to `folder`."""
    rows = [json.loads(line) for line in (material / "data/squad/squad2_dev_half_qa.jsonl").read_text().splitlines()]
    rows = [{"id": row["id"], "question": row["question"], "answers": row["answers"]} for row in rows if row["answers"]]
    step = max(1, len(rows) // (n + MOST_SHOTS))
    dev, test = rows[: MOST_SHOTS * step : step], rows[MOST_SHOTS * step :: step][:n]
    for name, part in (("dev", dev), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "task.yaml").write_text(yaml.safe_dump(TASK))
    question_set = {"path": "test.jsonl", "shots_from": "dev.jsonl"}
    section = {
        "models": {"m": "model"}, "questions": {"squad": question_set}, "formats": ["generate"], "scores": ["exact"],
        "shots": [MOST_SHOTS], "stop": ["\n\n\n\n"],
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"run_dir": "run", "eval": section}))


def harness_texts(folder: Path) -> dict[str, str]:
    """Return the harness's answers by question."""
    (path,) = (folder / "harness").rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["doc"]["id"]: row["resps"][0][0] for row in rows}


def main() -> None:
    """Run both sides and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--harness", default="", help="a Python that has lm_eval")
    parser.add_argument("--batch", default="1", help="batch size of the harness")
    parser.add_argument("--material", type=Path, default=Path(__file__).parents[3] / "shared")
    parser.add_argument("--layers", type=int, default=8, help="of the model; 8 make 51M parameters")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        n_parameters = make_model(
            folder / "model", arguments.material / "models" / "tokenizers" / "gpt2", arguments.layers
        )
        write_files(folder, arguments.material, arguments.questions)
        print(f"{n_parameters / 1e6:.0f}M parameters, {arguments.questions} questions, 5 shots, 32 tokens", flush=True)
        ours = measure([sys.executable, "-c", KINJECT], folder, arguments.threads)
        rows = [json.loads(line) for line in (folder / "run" / "answers.jsonl").read_text().splitlines()]
        texts = {row["question_id"]: row["text"] for row in rows}
        n = len(texts)
        print(
            f"kinject: {ours.wall:.1f} s, {ours.cpu:.1f} s of processor time, {n / ours.wall:.2f} a second", flush=True
        )
        if not arguments.harness:
            return
        task = [arguments.harness, "-m", "lm_eval", "--model", "hf", "--model_args", "pretrained=model,dtype=float32"]
        task += ["--device", "cpu", "--tasks", "task.yaml", "--num_fewshot", "5", "--batch_size", arguments.batch]
        theirs = measure(
            [*task, "--output_path", "harness", "--log_samples"], folder, arguments.threads, HF_HUB_OFFLINE="1"
        )
        same = harness_texts(folder)
        n_same = sum(texts[key] == text for key, text in same.items())
        print(
            f"lm-evaluation-harness, batch {arguments.batch}: {theirs.wall:.1f} s, {theirs.cpu:.1f} s of processor time; "
            f"{theirs.wall / ours.wall:.1f} times, of processor time {theirs.cpu / ours.cpu:.1f} times; same texts "
            f"{n_same} of {len(same)}"
        )


if __name__ == "__main__":
    main()
