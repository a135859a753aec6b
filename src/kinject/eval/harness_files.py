"""lm-evaluation-harness's result files: answers written in its layout, and its samples read as answers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import stdev
from typing import Any

from kinject.corpus.grading import exact_match, f1
from kinject.disk import Row, content_id, delete_file, file_name, read_jsonl, write_json, write_jsonl
from kinject.errors import InputError
from kinject.eval.prompts import Prompt
from kinject.eval.scores import Score, best_choice, scores_of
from kinject.types import Answer, Question

_METRICS: Mapping[str, Score] = {"acc": "sum", "acc_norm": "chars", "acc_bytes": "bytes"}
_NAME = re.compile(r"^samples_(?P<task>.+?)_\d{4}-\d{2}-\d{2}T[\d.-]+\.jsonl$")


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered question with its prompt as it was asked."""

    question: Question
    prompt: Prompt
    answer: Answer


def read_samples(path: Path) -> list[Answer]:
    """Return the multiple-choice answers in a ``samples_TASK_DATE.jsonl`` of lm-evaluation-harness (0.4).

    A question's id is the `id` of its document if there is one, else its `doc_hash`. Raises `DiskError` when the
    file cannot be read and `InputError` (file:line) when a row holds no log-probs of choices.
    """
    match = _NAME.match(path.name)
    task = match["task"] if match else path.stem.removeprefix("samples_")
    answers: list[Answer] = []
    lines: dict[str, int] = {}
    for number, row in read_jsonl(path):
        answer = _answer_of(row, task, f"{path}:{number}")
        first = lines.setdefault(answer.question_id, number)
        if first != number:
            fault = f"question {answer.question_id!r:.80} is there twice, first on line {first}. Keep one."
            raise InputError(f"{path}:{number}: {fault}")
        answers.append(answer)
    return answers


def _answer_of(row: Row, task: str, location: str) -> Answer:
    doc, pairs = row.get("doc"), row.get("filtered_resps")
    if not isinstance(doc, dict) or not isinstance(pairs, list) or "target" not in row:
        raise InputError(f"{location}: no sample of lm-evaluation-harness: it needs doc, target and filtered_resps.")
    try:
        log_probs = tuple(float(pair[0]) for pair in pairs)
        gold = _index(row["target"])
    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
        fault = "filtered_resps must be pairs of log-prob and greedy, target the index of the correct choice"
        raise InputError(f"{location}: no multiple-choice sample: {fault} ({error}).") from error
    if not 0 <= gold < len(log_probs):
        raise InputError(
            f"{location}: target is {gold}, but there are log-probs of {len(log_probs)} choices. Count from 0."
        )
    texts = _continuations(row.get("arguments"), len(log_probs))
    identity = doc.get("id", row.get("doc_hash", row.get("doc_id")))
    return Answer(
        question_id=str(identity), question_set=task, arm="lm-evaluation-harness", format=task, shots=0, k=0,
        context_ids=(), gold=gold, log_probs=log_probs, n_tokens=(),
        n_bytes=tuple(len(text.encode()) for text in texts), n_chars=tuple(map(len, texts)),
        subject=str(doc.get("subject", "")), document_id=str(doc.get("document_id", "")),
    )  # fmt: skip


def _index(value: object) -> int:
    """Return a whole number, or one written as a text. Raises `TypeError` for others: 1.7 is no index, nor is true."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"found {value!r:.40}")
    return int(value)


def _continuations(arguments: object, n: int) -> list[str]:
    """Return the texts of the choices without the space before them; [] if the sample lacks them."""
    if not isinstance(arguments, Mapping):
        return []
    requests = [arguments.get(f"gen_args_{index}") for index in range(n)]
    texts = [item.get("arg_1") for item in requests if isinstance(item, Mapping)]
    return [text.removeprefix(" ") for text in texts if isinstance(text, str)] if len(texts) == n else []


def write_samples(folder: Path, samples: Mapping[str, Mapping[str, Sequence[Sample]]]) -> None:
    """Write the samples of each arm, by task, into a folder of its own, in place of those of an earlier run."""
    for arm, tasks in samples.items():
        arm_folder = folder / file_name(arm)
        for old in (*arm_folder.glob("samples_*.jsonl"), *arm_folder.glob("results_*.json")):
            delete_file(old)  # two dates would be read as two results
        shots = {task: rows[0].answer.shots for task, rows in tasks.items()}
        date = datetime.now(UTC).replace(tzinfo=None).isoformat(timespec="microseconds")
        write_harness_files(arm_folder, tasks, {"model_name": arm, "date": date, "n_shot": shots})


def write_harness_files(folder: Path, samples: Mapping[str, Sequence[Sample]], about: Mapping[str, Any]) -> list[Path]:
    """Write ``results_DATE.json`` and a ``samples_TASK_DATE.jsonl`` for each task into `folder`; return their paths.

    `samples` are by task name; `about` holds `model_name`, `date` (ISO, written with dashes) and `n_shot` by task.
    The layout is that of lm-evaluation-harness 0.4's evaluation tracker. Raises `DiskError` on I/O.
    """
    date = str(about["date"]).replace(":", "-")
    paths = []
    results: dict[str, dict[str, Any]] = {}
    for task, of_task in samples.items():
        path = folder / f"samples_{file_name(task)}_{date}.jsonl"
        write_jsonl(path, _sample_rows(of_task))
        paths.append(path)
        results[task] = _result(task, of_task)
    shots = {task: int(about["n_shot"][task]) for task in samples}
    content = {
        "results": results,
        "group_subtasks": {task: [] for task in samples},
        "configs": {
            task: {"task": task, "output_type": _output_type(of_task), "num_fewshot": shots[task]}
            for task, of_task in samples.items()
        },
        "versions": dict.fromkeys(samples, 1.0),
        "n-shot": shots,
        "higher_is_better": {
            task: dict.fromkeys(_scored(of_task[0].answer), True) for task, of_task in samples.items()
        },
        "n-samples": {task: {"original": len(of_task), "effective": len(of_task)} for task, of_task in samples.items()},
        "config": {"model": "kinject", "model_args": {"pretrained": about["model_name"]}, "bootstrap_iters": 0},
        "model_name": about["model_name"],
        "model_name_sanitized": re.sub(r"[\"<>:/\|\\?\*\[\]]+", "__", str(about["model_name"])),
        "model_source": "kinject",
    }
    path = folder / f"results_{date}.json"
    write_json(path, content)
    return [path, *paths]


def _output_type(samples: Sequence[Sample]) -> str:
    return "multiple_choice" if samples[0].answer.text is None else "generate_until"


def _text_row(number: int, doc: dict[str, Any], sample: Sample) -> Row:
    """Return the row of an answer that the model wrote."""
    answer, target = sample.answer, list(sample.answer.accepted)
    return {
        "doc_id": number, "doc": doc, "target": target, "arguments": {"gen_args_0": {"arg_0": sample.prompt.context}},
        "resps": [[answer.text]], "filtered_resps": [answer.text], "filter": "none", "metrics": list(_scored(answer)),
        "doc_hash": content_id("doc", json.dumps(doc, sort_keys=True)),
        "prompt_hash": content_id("prompt", sample.prompt.context), "target_hash": content_id("target", target),
        **_scored(answer),
    }  # fmt: skip


def _scored(answer: Answer) -> dict[str, float | None]:
    """Return each metric of an answer, None without a score."""
    if answer.text is not None:
        return {"exact_match": float(exact_match(answer.text, answer.accepted)), "f1": f1(answer.text, answer.accepted)}
    chosen = {name: best_choice(scores_of(answer, score)) for name, score in _METRICS.items()}
    return {name: None if index is None else float(index == answer.gold) for name, index in chosen.items()}


def _result(task: str, samples: Sequence[Sample]) -> dict[str, Any]:
    values = [_scored(sample.answer) for sample in samples]
    result: dict[str, Any] = {"alias": task, "sample_len": len(samples)}
    for name in values[0]:
        scored = [number for value in values if (number := value[name]) is not None]
        mean = math.fsum(scored) / len(scored) if scored else None
        result[f"{name},none"] = mean
        # the harness's standard error: the sample standard deviation over the root of n
        result[f"{name}_stderr,none"] = stdev(scored) / math.sqrt(len(scored)) if len(scored) > 1 else "N/A"
    return result


def _sample_rows(samples: Sequence[Sample]) -> Iterator[Row]:
    for number, sample in enumerate(samples):
        question, answer = sample.question, sample.answer
        doc = {
            "id": question.id, "question": question.question, "choices": list(question.choices),
            "answer": question.answer, "subject": question.subject, "document_id": question.document_id,
        }  # fmt: skip
        if answer.text is not None:
            doc |= {"answers": list(answer.accepted)}
            yield _text_row(number, doc, sample)
            continue
        resps = [[f"{value}", f"{greedy}"] for value, greedy in zip(answer.log_probs, answer.greedy, strict=True)]
        arguments = {
            f"gen_args_{index}": {"arg_0": sample.prompt.context, "arg_1": text}
            for index, text in enumerate(sample.prompt.continuations)
        }
        yield {
            "doc_id": number, "doc": doc, "target": str(answer.gold), "arguments": arguments,
            "resps": [[pair] for pair in resps], "filtered_resps": resps, "filter": "none", "metrics": list(_METRICS),
            "doc_hash": content_id("doc", json.dumps(doc, sort_keys=True)),
            "prompt_hash": content_id("prompt", sample.prompt.context),
            "target_hash": content_id("target", str(answer.gold)),
            **_scored(answer),
        }  # fmt: skip
