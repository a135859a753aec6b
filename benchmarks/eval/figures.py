"""The figures of the scorer: a token tree against lm-evaluation-harness, in one run on one machine.

    python benchmarks/eval/figures.py [--questions 40] [--harness PYTHON] [--material FOLDER] [--model MODEL]

A Llama of 51 million parameters with random weights and GPT-2's tokenizer is made on the spot, or a real model is read
with --model, and answers the first questions of five MMLU subjects, in float32. `--harness` is a Python that has lm_eval
(default: this one); without it kinject's own times stand alone. Then, on the model that was made, K = 0..5 passages in one
run against six runs, and the memory of the head. `--questions 0` scores all; the default is 40 of each subject, since the
harness takes minutes for all.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kinject.corpus.questions import read_questions
from kinject.eval.prompts import PromptRequest, pick_shots
from kinject.eval.retrieval import Bm25Retriever, read_passages
from kinject.eval.scoring.encode import Encoder, encode_requests
from kinject.eval.scoring.scorer import Scorer
from kinject.gguf import converted_folder, gguf_file
from kinject.models import load_tokenizer, window_of
from kinject.recipe import RetrievalSection
from kinject.types import Question

SUBJECTS = ("anatomy", "astronomy", "college_biology", "college_chemistry", "prehistory")
WAYS: tuple[tuple[str, int, float], ...] = (
    ("letters", 5, 12.0),
    ("texts", 5, 18.0),
    ("texts", 0, 2.5),
)
LETTERS_TEXT = "{{question.strip()}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\nD. {{choices[3]}}\nAnswer:"


class Times(NamedTuple):
    """Seconds that went by, and seconds of processor time."""

    wall: float
    cpu: float


def make_model(folder: Path, tokenizer: Path, n_layers: int) -> int:
    """Save a Llama with random weights, and its tokenizer, to `folder`; return its parameters."""
    encoder: Any = load_tokenizer(str(tokenizer))
    encoder.add_special_tokens(
        {"eos_token": "<|endoftext|>"}
    )  # the harness decodes it for every request
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(encoder), hidden_size=512, intermediate_size=1376, num_hidden_layers=n_layers,
        num_attention_heads=8, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=encoder.eos_token_id, eos_token_id=encoder.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    encoder.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def model_folder(model: Path) -> Path:
    """Return the folder of a model that is a folder or a GGUF file."""
    file = gguf_file(model)
    return (converted_folder(file) if file else model).resolve()


def read_subjects(
    mmlu: Path, n_subjects: int, n: int, folder: Path
) -> dict[str, tuple[list[Question], list[Question], Path, Path]]:
    """Return questions and examples of each subject, with the files (cut to `n` questions) that the harness reads."""
    subjects = {}
    for subject in SUBJECTS[:n_subjects]:
        lines = (mmlu / f"{subject}.test.jsonl").read_text().splitlines()
        path = folder / f"{subject}.jsonl"
        path.write_text("\n".join(lines[: n or None]) + "\n")
        dev = mmlu / f"{subject}.dev.jsonl"
        subjects[subject] = (read_questions(path), read_questions(dev), path, dev)
    return subjects


def task_config(name: str, subject: str, format: str, test: Path, dev: Path) -> dict[str, Any]:
    """Return the harness's MMLU task (default or continuation) over local files."""
    letters = format == "letters"
    header = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(test), "dev": str(dev)}},
        "test_split": "test",
        "fewshot_split": "dev",
        "fewshot_config": {"sampler": "first_n"},
        "output_type": "multiple_choice",
        "description": header if letters else "",
        "doc_to_text": LETTERS_TEXT if letters else "Question: {{question}}\nAnswer:",
        "doc_to_choice": ["A", "B", "C", "D"] if letters else "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def ask_harness(
    python: str, engine: str, folder: Path, tasks: list[dict[str, Any]], threads: int, batch: int
) -> dict[str, Any]:
    """Return what the harness found with its model `engine`, or {} where `python` has no lm_eval."""
    probe = subprocess.run([python, "-c", "import lm_eval"], capture_output=True, check=False)
    if probe.returncode:
        return {}
    job, out = folder / "job.json", folder / "harness.json"
    values = {
        "engine": engine,
        "model": str(folder / "model"),
        "batch_size": batch,
        "threads": threads,
        "out": str(out),
        "tasks": tasks,
    }
    job.write_text(json.dumps(values))
    script = Path(__file__).with_name("harness_side.py")
    with (folder / "harness.log").open("w") as log:
        done = subprocess.run(
            [python, str(script), str(job)],
            stdout=log,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"lm-evaluation-harness failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def score(
    scorer: Scorer, encoder: Encoder, requests: Sequence[PromptRequest]
) -> tuple[Times, list[tuple[float, ...]]]:
    """Return the time for tokenising and scoring, and the log-probs in the order of `requests`."""
    began, cpu = time.perf_counter(), time.process_time()
    scores = dict(
        scorer.score(encode_requests(encoder, requests, window_of(scorer.forward.config)))
    )
    times = Times(time.perf_counter() - began, time.process_time() - cpu)
    return times, [scores[index].log_probs for index in range(len(requests))]


def rag_requests(shared: Path, n: int, most: int) -> list[list[PromptRequest]]:
    """Return for K = 0..most the same `n` SQuAD questions, in the form option texts, with their passages by BM25."""
    folder = shared / "data" / "squad"
    section = RetrievalSection(documents=(str(folder / "squad2_dev_half_paragraphs.jsonl"),))
    retriever = Bm25Retriever(read_passages(section))
    rows = [
        json.loads(line) for line in (folder / "squad2_dev_half_qa.jsonl").read_text().splitlines()
    ]
    by_k: list[list[PromptRequest]] = [[] for _ in range(most + 1)]
    for index in range(0, len(rows) - 4, len(rows) // n)[
        :n
    ]:  # wrong options: the answers to the questions after it
        choices = tuple(dict.fromkeys(row["answers"][0] for row in rows[index : index + 4]))
        question = Question(rows[index]["id"], rows[index]["question"], choices, 0)
        texts = tuple(passage.text for passage in retriever.find([question], most)[0])
        for k in range(most + 1):
            by_k[k].append(PromptRequest(question, "texts", (), texts[:k]))
    return by_k


def compare_rag(model: Any, encoder: Encoder, by_k: list[list[PromptRequest]]) -> Iterator[str]:
    """Yield the line about K = 0..5 in one run against a run for each K; the model is loaded once for all of them."""
    apart: list[Times] = []
    gap, n_apart = 0.0, 0
    scorer = Scorer(model, 16_384)
    score(scorer, encoder, by_k[1][:2])
    scorer.n_pushed = scorer.n_least = 0
    together, all_found = score(
        scorer, encoder, [request for requests in by_k for request in requests]
    )
    flat = iter(all_found)
    for requests in by_k:
        alone = Scorer(model, 16_384)
        assert alone.uses_tree
        alone.n_pushed = 0
        times, scores = score(alone, encoder, requests)
        apart.append(times)
        n_apart += alone.n_pushed
        gap = max(
            [gap, *(abs(a - b) for row in scores for a, b in zip(row, next(flat), strict=True))]
        )
    yield (
        f"RAG, K = 0..{len(by_k) - 1}, {len(by_k[0])} questions: one run {together.wall:.1f} s, separate runs "
        f"{sum(item.wall for item in apart):.1f} s, ratio {together.wall / sum(item.wall for item in apart):.2f}, of CPU time "
        f"{together.cpu / sum(item.cpu for item in apart):.2f} (figure: at most 0.50), of tokens "
        f"{scorer.n_pushed / n_apart:.2f} ({scorer.n_pushed:,} against {n_apart:,}); largest difference {gap:.1e}; "
        f"tokens over the least {scorer.n_pushed / scorer.n_least:.3f}"
    )


def memory_of_head(n_vocabulary: int) -> str:
    """Return the line about the peak of one pass with a large vocabulary, run in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--head", str(n_vocabulary)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def measure_head(n_vocabulary: int) -> None:
    """Score 64 prompts of 500 tokens with `n_vocabulary` pieces and print how the peak grew."""
    import numpy as np

    from kinject.eval.scoring.encode import Encoded

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=n_vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    scorer = Scorer(LlamaForCausalLM(config).eval(), 16_384)
    random = np.random.default_rng(0)
    prompts = []
    for _ in range(64):
        context = random.integers(0, n_vocabulary, 500, dtype=np.int32)
        prompts.append(
            Encoded(
                (context,) * 4,
                tuple(random.integers(0, n_vocabulary, 1, dtype=np.int32) for _ in "ABCD"),
            )
        )
    assert scorer.uses_tree
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    list(scorer.score(prompts))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    whole = 16_384 * n_vocabulary * 4 / 2**20
    print(
        f"head, vocabulary {n_vocabulary:,}: peak {before + grown:.0f} MiB, {grown:.0f} of them for scoring, "
        f"{scorer.n_pushed:,} tokens pushed; logits of every position of one pass (16,384) would be {whole:,.0f} MiB"
    )


def main() -> None:
    """Run all figures and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--questions", type=int, default=40, help="of each subject; 0: all")
    parser.add_argument(
        "--subjects", type=int, default=5, help="how many of the five; 0: passages and memory only"
    )
    parser.add_argument("--rag-questions", type=int, default=24)
    parser.add_argument("--harness", default=sys.executable, help="a Python that has lm_eval")
    parser.add_argument("--harness-batch", type=int, default=16)
    parser.add_argument("--material", type=Path, default=Path(__file__).parents[3] / "shared")
    parser.add_argument(
        "--model", type=Path, help="a folder or a GGUF file; nothing else is measured then"
    )
    parser.add_argument("--layers", type=int, default=8, help="of the model; 8 make 51M parameters")
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=128_256,
        help="tokens of the model whose head's memory is measured",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--head", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.head:
        measure_head(arguments.head)
        return
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.model:
            (folder / "model").symlink_to(model_folder(arguments.model))
            print(f"{arguments.model}, float32, {arguments.threads} threads")
            compare_mmlu(folder, arguments)
            return
        tokenizer_path = arguments.material / "models" / "tokenizers" / "gpt2"
        n_parameters = make_model(folder / "model", tokenizer_path, arguments.layers)
        print(
            f"Llama of {n_parameters / 1e6:.0f}M parameters, GPT-2 tokenizer, float32, {arguments.threads} threads"
        )
        if arguments.subjects:
            compare_mmlu(folder, arguments)
        model = LlamaForCausalLM.from_pretrained(folder / "model").eval()
        encoder = Encoder(load_tokenizer(str(folder / "model")))
        for line in compare_rag(
            model, encoder, rag_requests(arguments.material, arguments.rag_questions, 5)
        ):
            print(line, flush=True)
    print(memory_of_head(arguments.vocabulary), flush=True)


def compare_mmlu(folder: Path, arguments: argparse.Namespace) -> None:
    """Print a line for each way of asking MMLU: both sides' questions a second, and how far the log-probs differ."""
    subjects = read_subjects(
        arguments.material / "data" / "mmlu", arguments.subjects, arguments.questions, folder
    )
    encoder = Encoder(load_tokenizer(str(folder / "model")))
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    ours: dict[str, tuple[Times, list[tuple[float, ...]], list[Question], float]] = {}
    tasks = []
    for format, shots, _ in WAYS:
        scorer = Scorer(model, 16_384)
        assert scorer.uses_tree
        requests, questions = [], []
        for subject, (test_questions, pool, test, dev) in subjects.items():
            requests += [
                PromptRequest(question, format, pick_shots(question, pool, shots))
                for question in test_questions
            ]
            questions += test_questions
            name = f"{subject}_{format}_{shots}"
            tasks.append(
                {
                    "name": name,
                    "config": task_config(name, subject, format, test, dev),
                    "shots": shots,
                }
            )
        times, scores = score(scorer, encoder, requests)
        ours[f"{format}_{shots}"] = (times, scores, questions, scorer.n_pushed / scorer.n_least)
    theirs, inside = (
        ask_harness(
            arguments.harness, engine, folder, tasks, arguments.threads, arguments.harness_batch
        )
        for engine in ("hf", "kinject")
    )
    version = theirs.get("version", "not installed: give --harness PYTHON")
    print(
        f"MMLU, first {arguments.questions or 'all'} questions of {', '.join(subjects)}; lm-evaluation-harness {version}"
    )
    for format, shots, figure in WAYS:
        times, scores, questions, over = ours[f"{format}_{shots}"]
        line = (
            f"{format}, {shots} shots, {len(questions)} questions: kinject {len(questions) / times.wall:.1f} a second, tokens "
            f"over the least {over:.3f} (figure: 1.10)"
        )
        if theirs:
            parts = [theirs["tasks"][f"{subject}_{format}_{shots}"] for subject in subjects]
            slow, slow_cpu = (sum(part[key] for part in parts) for key in ("seconds", "cpu"))
            ours_inside = sum(
                inside["tasks"][f"{subject}_{format}_{shots}"]["cpu"] for subject in subjects
            )
            reference = [
                row for part in parts for row in part["log_probs"]
            ]  # in the order of the files
            pairs = list(zip(scores, reference, strict=True))
            gap = max(abs(a - b) for row, other in pairs for a, b in zip(row, other, strict=True))
            agree = sum(row.index(max(row)) == other.index(max(other)) for row, other in pairs)
            line += (
                f"; harness {len(questions) / slow:.2f}; {slow / times.wall:.1f} times, of CPU time {slow_cpu / times.cpu:.1f} "
                f"({slow_cpu:.1f} s to {times.cpu:.1f}, in the harness to "
                f"{ours_inside:.1f}; figure: {figure:g}); largest difference "
                f"{gap:.1e} (figure: 1e-4); same choice {agree} of {len(pairs)}"
            )
        print(line, flush=True)


if __name__ == "__main__":
    main()
