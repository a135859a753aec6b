"""Write tasks.json beside this file: what lm-evaluation-harness asks for small tasks. Run by a Python that has lm_eval.

Each task has the keys of one of its own (mmlu, mmlu_continuation, arc_easy, openbookqa), over rows made up here that hold
what goes wrong easily: choices that are numbers, an answer with a space before it, a text that ends in a line break, the
same row twice, a description that is a template.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

COUNT = ["3", "1", "0", "2"]
LETTERS = "\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\nD. {{choices[3]}}\nAnswer:"


def mmlu_rows(n: int, first: int) -> list[dict[str, Any]]:
    """Rows as the hub holds MMLU: no id, the answer an index."""
    return [
        {"question": f" How many towns has country {i}?\n", "subject": "some_towns", "choices": COUNT, "answer": i % 4}
        for i in range(first, first + n)
    ]


def arc_rows(n: int, first: int) -> list[dict[str, Any]]:
    """Rows as the hub holds ARC; the third has three choices, labelled by number."""
    rows = []
    for i in range(first, first + n):
        texts, labels = [f"the mill {i}", f"town {i}", "Farrow", "é 漢"], ["A", "B", "C", "D"]
        if i % 3 == 2:
            texts, labels = texts[:3], ["1", "2", "3"]
        rows.append(
            {
                "id": f"Mercury_{i}", "question": f"Where was number {i} born?",
                "choices": {"text": texts, "label": labels}, "answerKey": labels[i % 3],
            }
        )  # fmt: skip
    return rows


def book_rows(n: int, first: int) -> list[dict[str, Any]]:
    """Rows as OpenBookQA once held them: a space before the answer."""
    return [
        {
            "id": f"7-{i}", "question_stem": f"Number {i} was born in ", "answerKey": " B",
            "choices": {"text": ["Lowmere", "the town of Kelm"], "label": ["A", "B"]},
        }
        for i in range(first, first + n)
    ]  # fmt: skip


def sum_rows(n: int, first: int) -> list[dict[str, Any]]:
    """Rows as the hub holds GSM8K: the number after four hashes."""
    return [
        {
            "question": f"Number {i} has 1,0{i:02} mills and builds 2. How many?",
            "answer": f"1,0{i:02} + 2.\n#### 1,0{i + 2:02}",
        }
        for i in range(first, first + n)
    ]


def trivia_rows(n: int, first: int) -> list[dict[str, Any]]:
    """Rows as the hub holds TriviaQA: an object with aliases."""
    return [
        {"question_id": f"t{i}", "question": f"Where was number {i} born", "answer": {"aliases": [f"Kelm {i}", f"The Kelm-{i}"],
         "value": f"Kelm {i}"}}
        for i in range(first, first + n)
    ]  # fmt: skip


def begun_rows(n: int) -> list[dict[str, Any]]:
    """Rows whose answer is begun, by a text of their own or with white space around it; one choice begins another."""
    begun = ("The answer is", "I think", "It must be ", "\nWell:")
    return [
        {"question": f"Where was number {i} born?" + ("\n" if i % 3 == 2 else ""), "begun": begun[i % 4],
         "choices": ["Kelm", "Kelm of the Mills", f"Farrow {i}", "Low-mere"], "letter": f"({'ABCD'[i % 4]})", "gold": i % 4}
        for i in range(n)
    ]  # fmt: skip


def as_lines(rows: list[dict[str, Any]]) -> str:
    """Return rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


FILES = {
    "mmlu.test.jsonl": as_lines([*mmlu_rows(4, 0), *mmlu_rows(1, 0)]),
    "mmlu.dev.jsonl": as_lines(mmlu_rows(3, 10)),
    "arc.test.jsonl": as_lines(arc_rows(5, 0)),
    "arc.train.jsonl": as_lines(arc_rows(9, 20)),
    "sums.test.jsonl": as_lines(sum_rows(6, 0)),
    "sums.train.jsonl": as_lines(sum_rows(5, 30)),
    "trivia.jsonl": as_lines(trivia_rows(6, 0)),
    "open.jsonl": as_lines(
        [{"question": f"who is number {i}", "answer": [f"the Miller {i}", "Bryn"]} for i in range(6)]
    ),
    "book.jsonl": as_lines(book_rows(6, 0)),
    "begun.jsonl": as_lines(begun_rows(8)),
    "chosen.jsonl": as_lines(begun_rows(44)),
    "towns.csv": 'question,one,two,gold\n"Where, 1?",Kelm,7,0\nWhere 2?,Farrow,8,1\nWhere 3?,Lowmere,9,1\n',
}


def mmlu(**change: Any) -> dict[str, Any]:
    """The keys of the harness's mmlu template."""
    return {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "mmlu.test.jsonl", "dev": "mmlu.dev.jsonl"}},
        "test_split": "test", "fewshot_split": "dev", "fewshot_config": {"sampler": "first_n"},
        "output_type": "multiple_choice", "doc_to_text": "{{question.strip()}}" + LETTERS,
        "doc_to_choice": ["A", "B", "C", "D"], "doc_to_target": "answer", "metadata": {"version": 1.0}, **change,
    }  # fmt: skip


def arc(**change: Any) -> dict[str, Any]:
    """The keys of the harness's arc_easy."""
    return {
        "tag": ["ai2_arc"], "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"train": "arc.train.jsonl", "test": "arc.test.jsonl"}},
        "output_type": "multiple_choice", "training_split": "train", "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_target": "{{choices.label.index(answerKey)}}",
        "doc_to_choice": "{{choices.text}}", "should_decontaminate": True,
        "doc_to_decontamination_query": "Question: {{question}}\nAnswer:",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
        "metadata": {"version": 1.0}, **change,
    }  # fmt: skip


def written(name: str, **change: Any) -> dict[str, Any]:
    """The keys of the harness's triviaqa, over one file."""
    return {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"validation": name}}, "output_type": "generate_until",
        "validation_split": "validation", "doc_to_text": "Question: {{question}}?\nAnswer:",
        "doc_to_target": "{{answer.aliases}}", "target_delimiter": " ",
        "generation_kwargs": {"until": ["\n", ".", ","], "do_sample": False, "temperature": 0.0},
        "filter_list": [
            {"name": "remove_whitespace", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}
        ],
        "metric_list": [
            {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "ignore_case": True,
             "ignore_punctuation": True}
        ],
        "metadata": {"version": 3.0}, **change,
    }  # fmt: skip


def begun(**change: Any) -> dict[str, Any]:
    """The keys of a multiple-choice task that begins the answer, over one file."""
    return {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "begun.jsonl"}}, "test_split": "test",
        "fewshot_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "choices",
        "doc_to_target": "gold", "gen_prefix": "begun", "description": "Say where.", **change,
    }  # fmt: skip


NUMBERS = [
    {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "ignore_case": True,
     "ignore_punctuation": False, "regexes_to_ignore": [",", "\\$", "(?s).*#### ", "\\.$"]}
]  # fmt: skip
FILTERS = [
    {"name": "strict-match", "filter": [
        {"function": "regex", "regex_pattern": "#### (\\-?[0-9\\.\\,]+)"}, {"function": "take_first"}]},
    {"name": "flexible-extract", "filter": [
        {"function": "regex", "group_select": -1, "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)"},
        {"function": "take_first"}]},
]  # fmt: skip
WRITTEN = {
    "triviaqa": written("trivia.jsonl", fewshot_split="validation"),
    "gsm8k": written(
        "",
        dataset_kwargs={"data_files": {"test": "sums.test.jsonl", "train": "sums.train.jsonl"}},
        test_split="test",
        training_split="train",
        fewshot_split="train",
        validation_split=None,
        doc_to_text="Question: {{question}}\nAnswer:",
        doc_to_target="{{answer}}",
        metric_list=NUMBERS,
        filter_list=FILTERS,
        generation_kwargs={"until": ["Question:", "</s>"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 40},
    ),
    "nq_open": written(
        "open.jsonl",
        description="Answer these questions:\n\n",
        doc_to_text="Q: {{question}}?\nA:",
        doc_to_target="{{answer}}",
        fewshot_delimiter="\n",
        generation_kwargs=None,
        metric_list=[
            {**NUMBERS[0], "ignore_punctuation": True, "regexes_to_ignore": ["\\b(?:The |the |An |A |a |an )"]}
        ],
        filter_list=[{"name": "low", "filter": [{"function": "lowercase"}, {"function": "take_first"}]}],
    ),
}
LETTER = {"function": "multi_choice_regex", "regex_pattern": "(\\([A-Z]\\))"}
WRITTEN["mmlu_flan"] = begun(
    dataset_kwargs={"data_files": {"test": "chosen.jsonl"}},
    output_type="generate_until",
    doc_to_choice=None,
    doc_to_target="letter",
    generation_kwargs={"until": ["</s>"], "do_sample": False},
    filter_list=[
        {"name": "first", "filter": [LETTER, {"function": "take_first"}]},
        {"name": "flexible", "filter": [
            {**LETTER, "group_select": -1, "ignore_case": True, "ignore_punctuation": True, "regexes_to_ignore": ["the "]},
            {"function": "take_first"}]},
        {"name": "groups", "filter": [{**LETTER, "regex_pattern": "is (A)?|is (B)?", "fallback": "none"},
                                      {"function": "take_first"}]},
    ],
    metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
)  # fmt: skip
CHOSEN = (
    "{}", "It is {}, not (D).", "It is Kelm of the Mills.", "kelm of mills", "Kelm", "The answer is: B", "low mere", "(E) is B",
    "Nobody knows.", "Options: A, :C or : D", "",
)  # fmt: skip
ANSWERS = ("{}", " {} ", "the {}", "{}!", "No", "{} .", " The answer is {}", "#### 1,004", "It is $1,003. Or 7.")


HEADER = "The following are multiple choice questions (with answers) about {{subject|replace('_', ' ')}}.\n\n"
TASKS = {
    "letters": mmlu(description=HEADER),
    "letters_same_split": mmlu(fewshot_split="test"),
    "continuation": mmlu(
        doc_to_text="Question: {{question.strip()}}\nAnswer:\n", doc_to_choice="{{choices}}",
        doc_to_target="{{answer}}", target_delimiter="", fewshot_delimiter="\n---\n", description="subject",
    ),
    "arc": arc(),
    "arc_same_split": arc(training_split=None, fewshot_split="test"),
    "openbookqa": arc(
        dataset_kwargs={"data_files": {"validation": "book.jsonl"}}, training_split=None, test_split=None,
        validation_split="validation", doc_to_text="question_stem", doc_to_decontamination_query="question_stem",
        doc_to_target="{{choices.label.index(answerKey.lstrip())}}",
    ),
    "begun": begun(),
    "begun_by_template": begun(gen_prefix="Number {{question[17]}} was born in", target_delimiter="\n"),
    "csv": {
        "dataset_path": "csv", "dataset_kwargs": {"data_files": {"test": "towns.csv"}}, "test_split": "test",
        "output_type": "multiple_choice", "doc_to_text": "question", "doc_to_choice": "{{[one, two|string]}}",
        "doc_to_target": "gold",
    },
}  # fmt: skip
SHOTS = {
    "letters": 2,
    "letters_same_split": 3,
    "continuation": 1,
    "arc": 3,
    "arc_same_split": 2,
    "openbookqa": 2,
    "csv": 0,
    "triviaqa": 0,
    "gsm8k": 2,
    "nq_open": 0,
    "begun": 2,
    "begun_by_template": 1,
    "mmlu_flan": 1,
}
CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template; tasks that begin the answer are asked through it as well."""


def main() -> None:
    """Ask the harness, with a model that answers at random, and keep its prompts."""
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    class Writer(LM):
        """Writes the accepted text in one of several ways."""

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            """Return an answer a request."""
            texts = []
            for i, request in enumerate(requests):
                if "letter" in request.doc:
                    texts.append(CHOSEN[i % len(CHOSEN)].format(request.doc["letter"]))
                    continue
                target = request.doc["answer"]
                target = target["aliases"] if isinstance(target, dict) else target
                text = target if isinstance(target, str) else target[i % 2]
                texts.append(ANSWERS[i % len(ANSWERS)].format(text))
            return texts

        def loglikelihood(self, requests: list[Any]) -> list[Any]:
            """Return the same log-prob for each choice."""
            return [(-1.0, False)] * len(requests)

        tokenizer_name = "chat"

        def chat_template(self, chat_template: Any = False) -> str:
            """Return the template."""
            return CHAT

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            """Render a chat as the harness's own models do."""
            tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")), chat_template=CHAT
            )
            return str(
                tokenizer.apply_chat_template(
                    chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )  # fmt: skip

        loglikelihood_rolling = loglikelihood

    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, text in FILES.items():
            Path(name).write_text(text)
        prompts: dict[str, list[dict[str, Any]]] = {}
        for name, config in TASKS.items():
            task_config = json.loads(json.dumps({**config, "task": name}))
            result = simple_evaluate("dummy", tasks=[task_config], num_fewshot=SHOTS[name], bootstrap_iters=0)
            prompts[name] = [
                {
                    "context": sample["arguments"][0][0], "continuations": [pair[1] for pair in sample["arguments"]],
                    "target": sample["target"], "hash": sample["doc_hash"], "id": sample["doc"].get("id"),
                }
                for sample in result["samples"][name]
            ]  # fmt: skip
        chats: dict[str, list[dict[str, Any]]] = {}
        for name in ("begun", "begun_by_template", "mmlu_flan"):
            task_config = json.loads(json.dumps({**(TASKS | WRITTEN)[name], "task": name}))
            for multiturn in (False, True):
                result = simple_evaluate(
                    Writer(), tasks=[task_config], num_fewshot=SHOTS[name], bootstrap_iters=0, apply_chat_template=True,
                    fewshot_as_multiturn=multiturn, system_instruction="Be brief.",
                )  # fmt: skip
                kept = [sample for sample in result["samples"][name] if sample["filter"] in ("none", "first")]
                chats[f"{name}, multiturn {multiturn}"] = [
                    {"context": sample["arguments"][0][0], "continuations": [pair[1] for pair in sample["arguments"]]}
                    for sample in kept[:8]
                ]
        graded: dict[str, list[dict[str, Any]]] = {}
        for name, config in WRITTEN.items():
            task_config = json.loads(json.dumps({**config, "task": name}))
            result = simple_evaluate(Writer(), tasks=[task_config], num_fewshot=SHOTS[name], bootstrap_iters=0)
            graded[name] = [
                {
                    "context": sample["arguments"][0][0], "kwargs": sample["arguments"][0][1], "text": sample["resps"][0][0],
                    "filter": sample["filter"], "correct": sample["exact_match"], "doc": sample["doc_id"],
                }
                for sample in result["samples"][name]
            ]  # fmt: skip
    whole = {"files": FILES, "tasks": TASKS, "shots": SHOTS, "asked": prompts, "written": WRITTEN, "graded": graded}
    whole |= {"chat_template": CHAT, "chats": chats}
    (here / "tasks.json").write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
