"""Answers of a language model, labelled by a reader, against the checks of augment.

    python benchmarks/augment/refusals.py [DATA] [--part unseen] [--show] [--base-url URL --model NAME]

DATA is a folder with documents.jsonl (id, title, language, text) and answers.jsonl (document_id, style, answer, faithful,
and optionally part and note); without it the 59 answers of answers/, in eleven languages, are taken. For each style and
each language it prints how many faithful answers are refused and how many unfaithful ones accepted: at the first check
and, with a model, after a judge has read what the check accepts. An answer is accepted if one of its texts
is. `--show` names every faithful answer that is refused and every unfaithful one that is accepted. All texts here were
written for kinject; half of answers/ ("unseen") and the four other folders were not looked at before they were measured.
`--facts` prints how many faithful texts would be lost to the rule that a text needs one of its passage's facts, by how
many a text of its length would have, and by how many facts the passage had if it had only its first ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kinject.augment.answers import repair
from kinject.augment.checks.checker import Checker, Rules, Verdict
from kinject.augment.checks.judge import Judge
from kinject.augment.styles import STYLES
from kinject.llm.limits import limits_of
from kinject.llm.sender import gather_answers, open_sender
from kinject.recipe import GeneratorSection


@dataclass
class Result:
    """An answer with its document, the verdict of the checks, and that of the judge."""

    index: int
    answer: dict[str, Any]
    document: dict[str, Any]
    text: str
    rules: Rules
    checked: Verdict
    judged: Verdict | None = None
    texts: tuple[tuple[str, Verdict], ...] = ()

    @property
    def good(self) -> bool:
        """Whether the reader found it faithful."""
        return bool(self.answer["faithful"])

    def outcome(self, final: bool) -> str:
        """Return "refused" or "accepted", after the judge if `final`."""
        verdict = self.judged if final and self.judged is not None else self.checked
        return "accepted" if verdict.accepted else "refused"


def read_results(data: Path, part: str, *, factless: bool = False) -> list[Result]:
    """Return the checked answers of a folder. Lists of strategies are no texts, so they are left out.

    With `factless` a text may have none of the passage's facts, whatever its style.
    """
    documents = {
        row["id"]: row
        for row in map(json.loads, (data / "documents.jsonl").read_text("utf-8").splitlines())
    }
    results = []
    for index, line in enumerate((data / "answers.jsonl").read_text("utf-8").splitlines()):
        answer = json.loads(line)
        if answer["style"].endswith("_strategies") or (part and answer.get("part", part) != part):
            continue
        document = documents[answer["document_id"]]
        style = STYLES.get(answer["style"])
        rules = style.rules if style else Rules()
        if factless:
            rules = replace(rules, factless=True)
        checker = Checker(document["text"], rules, context=document["title"])
        read = (
            style.read(answer["answer"], document["title"], document["text"])
            if style
            else repair(answer["answer"])
        )
        texts = [checker.without_additions(text)[0] for text in read.texts]
        verdicts = [checker.check(text) for text in texts] or [checker.check("")]
        checked = next((verdict for verdict in verdicts if verdict.accepted), verdicts[0])
        first = texts[0] if texts else ""
        read_texts = tuple(zip(texts, verdicts, strict=False))
        results.append(Result(index, answer, document, first, rules, checked, texts=read_texts))
    return results


async def ask_judge(results: Sequence[Result], base_url: str, model: str) -> None:
    """Ask a model about every answer that the checks accept."""
    generator = GeneratorSection(kind="openai", base_url=base_url, model=model, temperature=0.0)
    limits = limits_of(generator, None)
    accepted = [result for result in results if result.checked.accepted]
    with tempfile.TemporaryDirectory() as folder:
        async with open_sender(generator, Path(folder), limits) as sender:
            judge = Judge(sender, seed=0)
            verdicts = await gather_answers(
                judge.verdict(item.document["title"], item.document["text"], item.text, item.rules)
                for item in accepted
            )
    for result, verdict in zip(accepted, verdicts, strict=True):
        if not isinstance(verdict, Verdict):
            raise SystemExit(f"The judge gave no answer: {verdict}")
        result.judged = verdict


_EXPECTED, _FIRST_FACTS = (1, 2, 3, 4, 5, 6), (3, 5, 8, 12)


def render_facts(folders: Sequence[Path]) -> str:
    """Return the table of faithful texts that the rule "no facts" judges and loses; texts of styles
    that may have none are left out."""
    judged: Counter[tuple[int, str]] = Counter()
    lost: Counter[tuple[int, str]] = Counter()
    for folder in folders:
        for result in read_results(folder, "", factless=True):
            style = STYLES.get(result.answer["style"])
            if not result.good or (style and style.rules.factless):
                continue
            source = result.document["text"]
            checker = Checker(source, result.rules, context=result.document["title"])
            ids = [fact.id for fact in checker.countable]
            for text, verdict in result.texts:
                if not verdict.accepted:
                    continue
                carried = set(verdict.measures["facts"])
                for n_facts in (*_FIRST_FACTS, len(ids)):
                    if n_facts > len(ids):
                        continue
                    name = "all" if n_facts == len(ids) else str(n_facts)
                    for expected in _EXPECTED:
                        if n_facts * min(1.0, len(text) / len(source)) >= expected:
                            judged[expected, name] += 1
                            lost[expected, name] += not carried & set(ids[:n_facts])
    lines = [
        "| facts in a text so long, from | facts of the passage | faithful texts | without any |",
        "|---|---|---|---|",
    ]
    for expected in _EXPECTED:
        for name in (*map(str, _FIRST_FACTS), "all"):
            key = (expected, name)
            lines.append(f"| {expected} | {name} | {judged[key]} | {lost[key]} |")
    return "\n".join(lines)


def render_table(results: Sequence[Result], key: str, final: bool) -> str:
    """Return a table of the outcomes by style or by language."""
    counts: dict[str, Counter[tuple[bool, str]]] = defaultdict(Counter)
    for result in results:
        name = result.answer["style"] if key == "style" else result.document["language"]
        for row in (name, "all"):
            counts[row][result.good, result.outcome(final)] += 1
    lines = [
        f"| {key} | faithful | refused | unfaithful | refused | accepted |",
        "|---|---|---|---|---|---|",
    ]
    for name, count in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        good, bad = (
            sum(n for (faithful, _), n in count.items() if faithful is label)
            for label in (True, False)
        )
        refused = count[True, "refused"]
        cells = [good, f"{refused} ({refused / good:.0%})" if good else "-", bad]
        cells += [count[False, outcome] for outcome in ("refused", "accepted")]
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def render_mistakes(results: Sequence[Result], final: bool) -> str:
    """Return a line for every faithful answer that is refused and every unfaithful one that is accepted."""
    lines = []
    for result in results:
        outcome, faithful = result.outcome(final), result.good
        if (outcome == "refused") is faithful:
            verdict = result.judged if final and result.judged is not None else result.checked
            why = f"{verdict.reason}: {verdict.detail}"
            note = "" if faithful else f" [{result.answer.get('note', '')}]"
            label = "faithful" if faithful else "unfaithful"
            lines.append(
                f"{result.index} {result.document['id']} {result.answer['style']}: {label}, {outcome}, {why}{note}"
            )
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?", default=Path(__file__).with_name("answers"))
    parser.add_argument(
        "--part", default="", help="only the answers of this part (tuning or unseen)"
    )
    parser.add_argument(
        "--show", action="store_true", help="name the answers on which check and reader differ"
    )
    parser.add_argument(
        "--facts", action="store_true", help="print the table of texts without facts, and stop"
    )
    parser.add_argument("--base-url", default="", help="endpoint of a judge")
    parser.add_argument("--model", default="", help="model of a judge")
    arguments = parser.parse_args()
    if arguments.facts:
        print(render_facts([arguments.data]))
        return
    results = read_results(arguments.data, arguments.part)
    if arguments.model:
        asyncio.run(ask_judge(results, arguments.base_url, arguments.model))
    for final in (False, True) if arguments.model else (False,):
        print("\nAfter the judge\n" if final else "\nAt the first check\n")
        print(
            render_table(results, "style", final),
            render_table(results, "language", final),
            sep="\n\n",
        )
        if arguments.show:
            print("", render_mistakes(results, final), sep="\n")


if __name__ == "__main__":
    main()
