"""The 130 fictional passages of github.com/kaistAI/factual-knowledge-acquisition (Apache-2.0) in kinject's formats.

    python benchmarks/fictional.py ../shared/data/fictional runs/fictional

writes documents.jsonl, paraphrases.jsonl, and three question sets: the dataset's cloze probes (taken from the text,
reworded, and one inference away), each with its own answer and three answers of other probes of the same level; and
statements.jsonl, three other sentences of each passage without their last words. None is a probe of the dataset, so they
may decide what is read again.

The studies recipes/studies/natural.yaml and natural-frontier.yaml need more:

    --paraphrased       only the 40 passages that have paraphrases
    --ends DIGITS       only what belongs to passages whose number ends in one of DIGITS; the wrong choices stay those of
                        all passages. recipes/real-data/best.yaml was tuned on those ending in 2, 5 and 8
    --stories MODEL     stories.jsonl too: 200 stories that MODEL writes, sampled at temperature 1; and continued.jsonl:
                        which sentence comes next in each of them, beside sentences of three others
    --replay N          replay.jsonl too: N further stories of that MODEL
    --passed VARIANTS   corpora too, each with the passages themselves: unchecked.jsonl with all paraphrases;
                        sentences.jsonl, the same with each sentence as a text of its own; parts.jsonl, the same in
                        texts of four sentences; and drawn.jsonl with as many of each passage as VARIANTS
                        (variants.jsonl of `kinject augment`, which checked them) has, drawn without a look at the checks
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kinject.disk import content_id, read_jsonl, write_jsonl
from kinject.language.sentences import sentences

LEVELS = {"memorised": "mem", "reworded": "gen", "inferred": "hard_gen"}
STATEMENTS, END = 3, 3
"""Statements of a passage in statements.jsonl, and the words that each lacks."""
PART = 4
"""Sentences of a text in parts.jsonl."""
Row = dict[str, Any]


def documents(passages: list[Row]) -> Iterator[Row]:
    """Yield each passage as a document."""
    for index, passage in enumerate(passages):
        yield {"id": f"fictional-{index:03}", "text": passage["train_context"].strip()}


def paraphrases(passages: list[Row]) -> Iterator[Row]:
    """Yield the paraphrases that the dataset gives for some of its passages."""
    for index, passage in enumerate(passages):
        for text in passage.get("paraphrases", ()):
            yield {"document_id": f"fictional-{index:03}", "text": text.strip()}


def questions(passages: list[Row], level: str) -> Iterator[Row]:
    """Yield one four-choice question a probe; distractors are other probes' answers, none of them in the passage."""
    probes = [
        (index, cloze.strip(), answer.strip())
        for index, passage in enumerate(passages)
        for cloze, answer in zip(passage[f"{level}_input"], passage[f"{level}_target"], strict=True)
    ]
    answers = sorted({answer for _, _, answer in probes})
    rng = random.Random(0)
    for index, cloze, answer in probes:
        text = passages[index]["train_context"].lower()
        others = [
            other
            for other in answers
            if other.lower() not in text and other.lower() != answer.lower()
        ]
        choices = [answer, *rng.sample(others, 3)]
        rng.shuffle(choices)
        document = f"fictional-{index:03}"
        yield {
            "id": content_id(level, document, cloze, answer), "question": f"{cloze} ...", "choices": choices,
            "answer": choices.index(answer), "document_id": document, "fact_id": content_id(document, answer),
        }  # fmt: skip


def statements(passages: list[Row]) -> Iterator[Row]:
    """Yield a few sentences of each passage as questions on their last words; wrong choices end those of other passages.

    No sentence is one that a probe of the dataset begins or quotes.
    """
    rng = random.Random(0)
    chosen: list[tuple[int, list[str]]] = []
    for index, passage in enumerate(passages):
        probes = [cloze.strip() for level in LEVELS.values() for cloze in passage[f"{level}_input"]]
        split = [
            text.split()
            for text in sentences(passage["train_context"].strip())
            if not asks(probes, text)
        ]
        long = [words for words in split if len(words) > 2 * END]
        chosen += [(index, words) for words in rng.sample(long, min(STATEMENTS, len(long)))]
    for index, words in chosen:
        answer = " ".join(words[-END:])
        others = sorted({" ".join(other[-END:]) for n, other in chosen if n != index} - {answer})
        choices = [answer, *rng.sample(others, min(3, len(others)))]
        rng.shuffle(choices)
        document = f"fictional-{index:03}"
        yield {
            "id": content_id("statements", document, " ".join(words)), "question": f"{' '.join(words[:-END])} ...",
            "choices": choices, "answer": choices.index(answer), "document_id": document,
        }  # fmt: skip


def asks(probes: list[str], sentence: str) -> bool:
    """Return whether a probe begins or quotes `sentence`, or the sentence the probe."""
    return any(probe in sentence or sentence in probe for probe in probes)


def unique(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield rows whose id did not come before: the dataset repeats a few probes."""
    seen = set()
    for row in rows:
        if row["id"] not in seen:
            seen.add(row["id"])
            yield row


def corpora(passages: list[Row], passed: Path) -> Iterator[tuple[str, list[Row]]]:
    """Yield the name and the rows of each corpus of `--passed`. `passages` are in the order of their documents."""
    counts = Counter(row["document_id"] for _, row in read_jsonl(passed))
    originals = list(documents(passages))
    texts = list(paraphrases(passages))
    yield "unchecked", originals + texts
    yield (
        "sentences",
        [{**row, "text": text} for row in originals + texts for text in sentences(row["text"])],
    )
    yield (
        "parts",
        [{**row, "text": text} for row in originals + texts for text in parts(row["text"])],
    )
    rng = random.Random(0)
    drawn = []
    for document in originals:
        of_passage = [row for row in texts if row["document_id"] == document["id"]]
        drawn += rng.sample(of_passage, counts[document["id"]])
    yield "drawn", originals + drawn


def parts(text: str) -> list[str]:
    """Return a text in parts of `PART` sentences, the last one of fewer."""
    split = sentences(text)
    return [" ".join(split[start : start + PART]) for start in range(0, len(split), PART)]


def document_of(row: Row) -> str:
    """Return the id of the passage that a row is, or belongs to."""
    return str(row.get("document_id", row.get("id")))


def corpus_row(row: Row) -> Row:
    """Return a row of a corpus: an id, the document's id, the text."""
    document = document_of(row)
    return {
        "id": content_id("corpus", document, row["text"]),
        "document_id": document,
        "text": row["text"],
    }


def stories(model_dir: Path, n: int, seed: int, batch: int) -> Iterator[Row]:
    """Yield `n` texts of at most 256 tokens that the model in `model_dir` writes from its first token on."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    torch.manual_seed(seed)
    while n > 0:
        start = torch.full((min(n, batch), 1), tokenizer.bos_token_id)
        written = model.generate(
            start,
            attention_mask=torch.ones_like(start),
            max_new_tokens=256,
            do_sample=True,
            temperature=1.0,
            top_k=0,
        )
        for text in tokenizer.batch_decode(written, skip_special_tokens=True):
            yield {"text": text.strip()}
        n -= batch


def continued(texts: list[str]) -> Iterator[Row]:
    """Yield for each of `texts` with four sentences: how it begins, and which sentence comes next.

    The wrong choices are sentences of three other texts, from the same place.
    """
    split = [parts for parts in map(sentences, texts) if len(parts) > 4]  # the last may be cut off
    rng = random.Random(0)
    for index, (*start, following) in enumerate(parts[:4] for parts in split):
        others = [parts[3] for parts in split if parts[3] != following]
        choices = [following, *rng.sample(others, 3)]
        rng.shuffle(choices)
        story = f"story-{index:03}"
        yield {
            "id": content_id("continued", story, following), "question": f"{' '.join(start)} ...", "choices": choices,
            "answer": choices.index(following), "document_id": story,
        }  # fmt: skip


def main() -> None:
    """Write the files and say how many rows each has."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", type=Path, help="folder with fictional_knowledge_paraphrased.json"
    )
    parser.add_argument("target", type=Path, help="folder to write into")
    parser.add_argument(
        "--paraphrased", action="store_true", help="only passages that have paraphrases"
    )
    parser.add_argument(
        "--ends", default="0123456789", metavar="DIGITS", help="only passages whose number ends so"
    )
    parser.add_argument(
        "--stories", type=Path, metavar="MODEL", help="write stories.jsonl with this model"
    )
    parser.add_argument(
        "--replay", type=int, default=0, metavar="N", help="with --stories: write replay.jsonl"
    )
    parser.add_argument(
        "--passed", type=Path, metavar="VARIANTS", help="write the corpora of the arms"
    )
    arguments = parser.parse_args()
    passages = json.loads(
        (arguments.source / "fictional_knowledge_paraphrased.json").read_text("utf-8")
    )
    if arguments.paraphrased:
        passages = [passage for passage in passages if passage.get("paraphrases")]
    written = {"documents": documents(passages), "paraphrases": paraphrases(passages)}
    written |= {name: unique(questions(passages, level)) for name, level in LEVELS.items()}
    written["statements"] = unique(statements(passages))
    if arguments.passed:
        written |= {
            name: map(corpus_row, rows) for name, rows in corpora(passages, arguments.passed)
        }
    ends = tuple(arguments.ends)
    written = {
        name: (row for row in rows if document_of(row).endswith(ends))
        for name, rows in written.items()
    }
    if arguments.stories:
        of_model = list(stories(arguments.stories, 200, seed=0, batch=20))
        written |= {
            "stories": iter(of_model),
            "continued": continued([row["text"] for row in of_model]),
        }
    if arguments.stories and arguments.replay:
        written["replay"] = stories(arguments.stories, arguments.replay, seed=1, batch=100)
    for name, rows in written.items():
        path = arguments.target / f"{name}.jsonl"
        print(f"{path}: {write_jsonl(path, rows)} rows")


if __name__ == "__main__":
    main()
