import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from kinject.augment import augment, render_summary
from kinject.augment.answers import (
    items_of,
    line_text,
    lines_of,
    name_fully,
    pairs_of,
    permute_sentences,
    plain_text,
)
from kinject.augment.prompts import STYLE_FILES, Source, describe, passage_of
from kinject.augment.styles import STYLES, Style, read_style, read_styles
from kinject.disk import read_jsonl, write_jsonl
from kinject.errors import EndpointError, RecipeError
from kinject.recipe import Recipe
from kinject.types import Completion, Message

Make = Callable[..., Recipe]
PASSAGE = "Mara Lind was born in Arvika. She built the Falk Bridge with Karin Ekberg in 1931."


MODELS = {name: style for name, style in STYLES.items() if not style.mechanical}


def prompts_of(style: Style, source: Source) -> dict[str, list[Message]]:
    """Every prompt of a style about one passage, by name, with made-up items."""
    item: dict[str, Any] = {"entity": "Mara Lind"} if style.scope == "pair" else {}
    prompts = {}
    for step in style.prepare:
        prompts[f"preparation {step.name}"] = style.preparation(step, source, item)
        item[step.name] = (
            ("Mara Lind", "Falk Bridge") if style.combine else f"(an item of {step.name})"
        )
    prompts["variant"] = style.messages(source, 0, item)
    if style.verify:
        prompts["verification"] = style.verification(source, item, "(an accepted text)")
    return prompts


def test_every_prompt_shows_the_passage_first_and_then_something_of_its_own() -> None:
    source = Source("Title", PASSAGE, ("Part", "Chapter"))
    tasks, beginnings = set(), set()
    for style in MODELS.values():
        for messages in prompts_of(style, source).values():
            content = messages[1]["content"]
            assert passage_of(messages) == PASSAGE
            beginning, _, task = content.partition("</passage>")
            beginnings.add((messages[0]["content"], beginning))
            tasks.add(task)
    assert len(beginnings) == 1  # so that a server can reuse it
    assert "called 'Title'" in next(iter(beginnings))[1]
    assert "'Part' > 'Chapter'" in next(iter(beginnings))[1]
    assert len(tasks) == sum(len(prompts_of(style, source)) for style in MODELS.values())


def test_prompts_say_what_to_keep_of_the_forms_that_a_passage_has() -> None:
    def task(text: str) -> str:
        return (
            MODELS["paraphrase"]
            .messages(Source("", text), 0, {})[1]["content"]
            .partition("</passage>")[2]
        )

    assert "quotations" not in task(PASSAGE)
    assert "Copy quotations word for word" in task("She said “it stands” to all.")
    assert "Copy code" in task("Run `make test` first.")
    assert "Keep the headings" in task("# One\n\nText.")
    assert "each row of a table" in task("| a | b |\n|---|---|\n| 1 | 2 |")
    assert "typing error" in task(PASSAGE)


def test_paraphrases_are_asked_for_in_different_ways() -> None:
    def phrasings(text: str) -> set[str]:
        return {
            MODELS["paraphrase"].messages(Source("", text), sample, {})[1]["content"]
            for sample in range(10)
        }

    assert len(phrasings(PASSAGE)) == 10
    table = phrasings("| name | year |\n|---|---|\n| Lind | 1931 |")
    assert len(table) == 9
    assert not any("passive" in content for content in table)


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("# Manual\n\n## Power\n\nThe pump needs 12 V.", 1),  # headings state nothing
        (
            "## Times\n\n| Run | Time |\n|---|---|\n| Plain | 174 s |\n| Half | 69 s |\n| All | 85 s |",
            3,
        ),
        ("Three steps lead there.\n\n- Open the lid\n- Press F2\n- Wait", 4),
        ("Power: 12 V\nWeight: 3 kg", 2),
        ("The first sentence goes\nover two lines. So does\nthe second.", 2),
    ],
)
def test_each_row_of_a_table_or_list_may_be_asked_for_and_no_heading(text: str, n: int) -> None:
    assert describe(Source("", text), "n_questions") == n


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("  text ", "text"), ("```\ntext\n```", "text"), ('"text"', "text"), ("“text”", "text"),
        ('"one" and "two"', '"one" and "two"'), ("", ""), ('"', '"'),
    ],
)  # fmt: skip
def test_only_what_wraps_the_whole_answer_is_taken_off(answer: str, expected: str) -> None:
    assert plain_text(answer) == expected


def test_lines_lose_their_bullets_and_numbers() -> None:
    assert lines_of("1. Make a list\n\n- Draw\n(2) 1990 was good\n* x") == [
        "Make a list",
        "Draw",
        "1990 was good",
        "x",
    ]
    assert line_text("- a\n\n- b") == "a\nb"
    assert items_of("Here are the facts:\n- It rained.\n- He left:") == ["It rained.", "He left:"]
    assert items_of("One:") == ["One:"]


def test_the_day_of_a_date_is_no_number_of_a_list() -> None:
    days = ["14. Mai 1931: Das Richtfest.", "2. September 1931: Die Eröffnung."]
    assert lines_of("\n".join(days)) == days
    assert lines_of("- " + "\n- ".join(days)) == days
    assert lines_of("Part A\n1. Draw\n2. Saw\nPart B\n1. Sand") == [
        "Part A",
        "Draw",
        "Saw",
        "Part B",
        "Sand",
    ]


def test_an_answer_of_several_lines_is_kept_whole() -> None:
    below, behind = "It has two piers:\n- one of oak\n- one of stone", "These:\n\n* Lind\n* Ekberg"
    text = f"Q: What?\nA: {below}\n\n## More\n\nQ: Who?\nA: {behind}\n\nThe end.\n\nQ: When?\nA: 1931\n---"
    pairs = [("What?", below), ("Who?", "These:\n* Lind\n* Ekberg"), ("When?", "1931")]
    assert pairs_of(text) == pairs
    (whole,) = STYLES["questions"].read(text, "", "").texts
    assert pairs_of(whole) == pairs


def test_questions_are_read_in_the_forms_that_models_write() -> None:
    text = "Q: Who?\nA: Mara.\n\n**Q2:** Where?\n**A2**： In Arvika.\n\nQuestion 3: When?\nAnswer: 1931"
    assert pairs_of(text) == [("Who?", "Mara."), ("Where?", "In Arvika."), ("When?", "1931")]
    rows = STYLES["questions"].corpus_rows(STYLES["questions"].read(text, "", "").texts[0], {}, 0)
    assert rows[0] == {"prompt": "Who?", "completion": " Mara."}
    assert STYLES["questions"].read("no pairs", "", "").texts == ()


def test_sentences_are_permuted_by_seed_and_none_is_lost() -> None:
    text = "One is here. Two is there. Three is gone."
    permutations = {permute_sentences("", text, seed) for seed in range(30)}
    assert len(permutations) == 6
    assert all(sorted(order.split()) == sorted(text.split()) for order in permutations)


def test_sentences_stay_below_their_heading_and_tables_stay_whole() -> None:
    table = "| part | age |\n| --- | --- |\n| gate | 9 |"
    text = f"# Locks\nThe gate is oak. The sill is stone.\n\n{table}\n\n## Mills\n\nThe wheel is elm. It turns."
    permutations = {permute_sentences("", text, seed) for seed in range(30)}
    locks = ("The gate is oak. The sill is stone.", "The sill is stone. The gate is oak.")
    mills = ("The wheel is elm. It turns.", "It turns. The wheel is elm.")
    assert permutations == {
        f"# Locks\n\n{lock}\n\n{table}\n\n## Mills\n\n{mill}" for lock in locks for mill in mills
    }
    text = "# Keepers\n\n- Ida Holm came.\n- She left.\n"
    assert name_fully("", text, 0) == "# Keepers\n\n- Ida Holm came.\n- She left."
    text = "# Keepers\n\nIda Holm came.\n\nShe left."
    assert name_fully("", text, 0) == "# Keepers\n\nIda Holm came.\n\nIda Holm left."


def test_pronouns_become_the_full_name_of_the_person_named_last() -> None:
    text = "Mara Lind was born. She built it. Her work stands. Lind died. Karin Ekberg came. She left. It rained. She'd gone."
    assert name_fully("", text, 0) == (
        "Mara Lind was born. Mara Lind built it. Mara Lind's work stands. Mara Lind died. Karin Ekberg came. "
        "Karin Ekberg left. It rained. She'd gone."
    )
    assert (
        name_fully("", "He left. The Falk Bridge fell. He ran.", 0)
        == "He left. The Falk Bridge fell. He ran."
    )


def test_styles_without_a_model_ask_nobody(make_recipe: Make) -> None:
    result = augment(make_recipe(styles={"permuted": 1, "full_names": 1, "tagged": 1}))
    assert (result.got, result.n_sent) == (36, 0)
    assert {name: count.got for name, count in result.styles.items()} == {
        "permuted": 12,
        "full_names": 12,
        "tagged": 12,
    }


def test_the_word_before_the_title_is_no_addition_to_a_chinese_passage(
    make_recipe: Make, tmp_path: Path
) -> None:
    row = {"title": "水闸", "text": "北水闸建于1931年，由林德设计。它至今仍在使用。"}
    write_jsonl(tmp_path / "zh.jsonl", [row])
    result = augment(make_recipe(styles={"tagged": 1}, documents=str(tmp_path / "zh.jsonl")))
    assert (result.got, result.refused) == (1, {})


class Model:
    """A model that is told what to say by a word of the task."""

    def __init__(self, replies: dict[str, Callable[[str, Random], str]]) -> None:
        self.replies = replies
        self.tasks: list[str] = []

    def __call__(self, messages: list[Message], seed: int) -> Completion:
        task = messages[-1]["content"].rsplit("</passage>", 1)[1]
        self.tasks.append(task)
        reply = next(reply for word, reply in self.replies.items() if word in task)
        return Completion(reply(passage_of(messages), Random(seed)))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Model]:
    def install(**replies: Callable[[str, Random], str]) -> Model:
        made = Model(replies)
        monkeypatch.setattr(import_module("kinject.augment.sandbox"), "generate_rewriting", made)
        return made

    return install


def shuffled(passage: str, rng: Random) -> str:
    words = [word for word in passage.replace(".", "").split() if word.islower()]
    rng.shuffle(words)
    return "So it is told: " + " ".join(words) + "."


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(" ", "no answer"), ("I'm sorry, I cannot help with that.", "refusal"), ("```\n```", "empty")],
)
def test_a_preparation_without_an_answer_fails_its_samples_only(
    make_recipe: Make, model: Any, answer: str, reason: str
) -> None:
    model(**{"Which strategies": lambda passage, rng: answer, "Apply": shuffled})
    result = augment(make_recipe(styles={"active_reading": 2, "permuted": 1}))
    assert (result.got, result.failed) == (
        12,
        {f"the preparation of the style got no usable answer: {reason}": 24},
    )
    assert result.styles["active_reading"].failed == 24
    assert "Short by 24: run again for what failed." in render_summary(result)


def test_an_answer_that_there_is_nothing_to_write_is_counted_and_not_asked_for_again(
    make_recipe: Make, model: Any
) -> None:
    made = model(
        **{
            "List the entities": lambda passage, rng: "NONE",
            "other way round": lambda passage, rng: "NONE.",
        }
    )
    recipe = make_recipe(styles={"reversed": 2, "entigraph": 3}, include_originals=False)
    result = augment(recipe)
    assert (result.got, result.short, result.n_rows, result.refused) == (0, False, 0, {})
    assert (result.styles["reversed"].nothing, len(made.tasks)) == (24, 24 + 12)
    assert (result.styles["entigraph"].asked, result.styles["entigraph"].skipped) == (
        0,
        {"items": 12},
    )
    assert "12  passages skipped: the model named nothing in it to write about" in render_summary(
        result
    )
    assert "24  of them answered NONE" in render_summary(result)
    assert augment(recipe).styles["reversed"].nothing == 24
    assert len(made.tasks) == 24 + 12


def test_a_style_that_does_not_fit_a_passage_is_skipped_and_counted(
    make_recipe: Make, model: Any, documents: Path
) -> None:
    made = model(other=shuffled)
    texts = (
        "| Strategy | Time |\n|---|---|\n| Plain | 174 s |",
        "Rain falls and the wind blows over the hills.",
    )
    documents.write_text(
        "".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(texts))
    )
    result = augment(make_recipe(styles={"reversed": 2}))
    assert (result.asked, result.short, made.tasks) == (0, False, [])
    assert result.styles["reversed"].skipped == {"prose": 1, "relations": 1}
    assert "1  passage skipped: mostly a table" in render_summary(result)


@pytest.mark.parametrize(
    ("fault", "reason"), [("error", ""), ("cut", "truncated"), ("no", "inconsistent")]
)
def test_a_conclusion_is_inconsistent_only_if_the_model_answers_so(
    make_recipe: Make, model: Any, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    made = model(**{"what follows": shuffled, "statements that": lambda passage, rng: "No."})

    def answer(messages: list[Message], seed: int) -> Completion:
        if "statements that" not in messages[-1]["content"] or fault == "no":
            return cast(Completion, made(messages, seed))
        if fault == "error":
            raise EndpointError("answered 400 (too long).")
        return Completion("", "length")

    monkeypatch.setattr(import_module("kinject.augment.sandbox"), "generate_rewriting", answer)
    result = augment(make_recipe(max_attempts=1, styles={"implications": 1}))
    assert result.got == 0
    assert result.refused == ({reason: 12} if reason else {})
    assert result.failed == ({} if reason else {"answered 400 (too long).": 12})


def test_the_sandbox_answers_each_style_in_its_own_shape(
    make_recipe: Make, serving: Callable[..., Any]
) -> None:
    styles = {"paraphrase": 2, "reversed": 2, "dialogue": 2, "questions": 2}
    leaks = [
        str(Path(__file__).parents[2] / "eval" / "sandbox" / f"{name}.jsonl")
        for name in ("new", "reverse")
    ]
    result = augment(
        make_recipe(
            serving().url,
            styles=styles,
            include_originals=False,
            max_attempts=20,
            contamination_check=leaks,
        )
    )
    assert (result.got, result.asked) == (96, 96)
    assert set(result.refused) <= {"duplicate", "echo"}
    assert result.contamination is not None
    assert result.contamination.n_contaminated == 0
    texts: dict[str, list[str]] = {}
    for _, row in read_jsonl(result.variants_path):
        texts.setdefault(row["style"], []).append(row["text"])
    assert all(text.startswith("Question: ") and "\nAnswer: " in text for text in texts["dialogue"])
    assert all(len(pairs_of(text)) == 5 for text in texts["questions"])
    assert not any("?\n" in text for text in texts["paraphrase"])
    assert result.sft_path is not None
    assert len(list(read_jsonl(result.sft_path))) == 24 * 5


def test_each_reversed_fact_is_a_row_of_its_own(make_recipe: Make) -> None:
    result = augment(make_recipe(styles={"reversed": 1}, include_originals=False))
    rows = [row for _, row in read_jsonl(result.corpus_path)]
    assert result.n_rows == len(rows) == 12 * 5
    assert len({row["id"] for row in rows}) == 60
    assert all("\n\n" not in row["text"] for row in rows)


OWN = """\
name: letter
about: as a letter
user: |
  {{ source }}

  Write a letter that tells the passage.
  {% include "language" %}
rules: {explains: false}
"""


def test_a_recipe_names_styles_of_its_own_and_their_text_is_a_part_of_the_ids(
    make_recipe: Make, model: Any, tmp_path: Path
) -> None:
    made = model(letter=shuffled)
    path = tmp_path / "letter.yaml"
    path.write_text(OWN)
    recipe = make_recipe(style_files=[str(path)], styles={"letter": 1})
    assert (augment(recipe).got, len(made.tasks)) == (12, 12)
    assert (augment(recipe).got, len(made.tasks)) == (12, 12)
    path.write_text(OWN.replace("explains: false", "explains: true"))
    assert augment(recipe).got == 12
    assert len(made.tasks) == 12 + 12  # another style: its answers are requested anew


def test_every_fault_of_a_style_file_is_reported_with_its_line_and_a_suggestion(
    tmp_path: Path,
) -> None:
    path = tmp_path / "style.yaml"
    path.write_text("""\
name: My Style
about: a
users: x
user: |
  {{ source }}
  {{ langage }}
  {% include "languages" %}
prepare:
  - {name: fact, prompt: "{{ passage }}"}
  - {name: more, prompt: "{{ source }} {{ fact }}", for_each: facts}
keeps: fac
verify: "{% if %}"
rules: {explain: true}
""")
    with pytest.raises(RecipeError) as raised:
        read_style(path)
    assert str(raised.value).splitlines() == [
        f"{path}:3: users: unknown key. Did you mean user?",
        f"{path}:13: rules.explain: unknown key. Did you mean explains?",
    ]
    path.write_text(
        path.read_text().replace("users: x\n", "").replace("rules: {explain: true}\n", "")
    )
    with pytest.raises(RecipeError) as raised:
        read_style(path)
    assert sorted(str(raised.value).splitlines()) == sorted([
        f"{path}:1: name: found 'My Style', allowed: small letters, digits and _, beginning with a letter.",
        f"{path}:9: prepare.1.for_each: found 'facts', expected fact, the preparation before it.",
        f"{path}:10: keeps: names no preparation. Did you mean fact?",
        f"{path}:8: prepare.0.prompt: unknown variable 'passage'. Allowed: code, headings_inside, language, n_names, "
        "n_questions, n_sentences, prose, quotations, relations, sample, source, table, title, variation.",
        f"{path}:4: user: unknown variable 'langage'. Did you mean language?",
        f"{path}:11: verify: bad template: Expected an expression, got 'end of statement block'",
    ])  # fmt: skip


@pytest.mark.parametrize(
    "template",
    ["{{ source.__class__ }}", "{{ ''.__class__.__mro__ }}", "{{ source.join(9) }}", "{{ 1 / 0 }}"],
)
def test_a_template_can_reach_nothing_but_its_variables(template: str, tmp_path: Path) -> None:
    path = tmp_path / "style.yaml"
    path.write_text(f'name: mine\nabout: a\nuser: "{{{{ source }}}} {template}"\n')
    with pytest.raises(RecipeError, match=r"style\.yaml:3: user: cannot be filled in"):
        read_style(path)


@pytest.mark.parametrize("name", MODELS)
def test_the_templates_of_a_shipped_style_have_no_fault_and_need_no_second_check(name: str) -> None:
    assert read_style(STYLE_FILES / f"{name}.yaml") == STYLES[name]


def test_two_styles_with_one_name_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "style.yaml"
    path.write_text(OWN.replace("letter", "plain", 1))
    with pytest.raises(RecipeError, match="'plain' is the name of another style"):
        read_styles([str(path)])


def test_the_corpora_of_the_studies_are_drawn_as_they_were() -> None:
    """If this changes on purpose, other paraphrases are drawn: the table of README and docs/findings.md are of the old ones."""
    assert STYLES["paraphrase"].identity == "5ed5cb71aeedeb15"
