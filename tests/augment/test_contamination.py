"""A question must not be read before it is asked, but by way of the documents."""

from __future__ import annotations

import copy
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from kinject.augment import augment, render_summary
from kinject.augment.contamination import (
    ContaminationCheck,
    question_texts,
    render_contamination,
)
from kinject.corpus.questions import read_questions
from kinject.disk import read_jsonl, read_manifest_fields
from kinject.errors import InputError
from kinject.recipe import Recipe

Make = Callable[..., Recipe]
QUESTION = (
    "In which year did the engineer Mara Lind of Arvika finish the long bridge over the river Falk?"
)


def probes_of(path: Path, *questions: tuple[str, str], n_words: int = 13) -> ContaminationCheck:
    rows = [
        {"id": f"q{number}", "question": question, "choices": ["no", answer], "answer": 1}
        for number, (question, answer) in enumerate(questions)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    probes = ContaminationCheck(n_words)
    probes.read_questions(path)
    return probes


def ids_found(probes: ContaminationCheck, text: str) -> set[str]:
    fresh = copy.deepcopy(probes)
    fresh.check_row("corpus", Path("corpus.jsonl"), {"id": "row", "text": text})
    return set(fresh.result().by_place.get("corpus", ()))


def test_thirteen_words_in_a_row_leak_and_twelve_do_not(tmp_path: Path) -> None:
    words = QUESTION.rstrip("?").split()
    assert len(words) == 18
    for length, expected in ((12, set()), (13, {"q0"}), (18, {"q0"})):
        for start in range(len(words) - length + 1):
            text = "Before, " + " ".join(words[start : start + length]).upper() + " -- after"
            assert ids_found(probes_of(tmp_path / "q.jsonl", (QUESTION, "1931")), text) == expected


def test_a_question_of_few_words_is_not_called_searched_for(tmp_path: Path) -> None:
    """With its mark "Where is Arvika?" has four words."""
    asked = [("Where is Arvika?", "there"), ("Who built it?", "x"), (QUESTION, "1931")]
    probes = probes_of(tmp_path / "q.jsonl", *asked)
    text = "Where is Arvika? It lies at the lake."
    probes.check_row("corpus", Path("corpus.jsonl"), {"id": "row", "text": text})
    result = probes.result()
    assert (result.n_questions, result.n_short, result.n_contaminated) == (1, 2, 0)
    assert render_contamination(result) == (
        "no contamination: none of 1 question is in the corpus; "
        "too short to be searched for: 2 more"
    )
    # A short beginning of a sentence is long enough with the answer behind it.
    probes = probes_of(tmp_path / "q.jsonl", ("Arvika lies at", "the lake of Glafs"))
    assert probes.result().n_short == 0


def test_mmlus_csv_is_read_as_kinject_eval_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "law_test.csv"
    path.write_text(f'"{QUESTION}",1930,1931,1932,1933,B\n')
    probes = ContaminationCheck(13)
    probes.read_questions(path)
    (question,) = read_questions(path)
    assert (probes.n_questions, ids_found(probes, f"Before. {QUESTION}")) == (1, {question.id})


def test_a_shorter_question_leaks_whole_where_it_is_asked_and_one_of_three_words_never(
    tmp_path: Path,
) -> None:
    probes = probes_of(
        tmp_path / "q.jsonl", ("Where was Arden born?", "Kelm"), ("Who was Arden?", "a smith")
    )
    for text in ("He asked: 'Where was Arden born'?", "Q: where was ARDEN born ?\nA: Kelm"):
        assert ids_found(probes, f"Who was Arden? {text}") == {"q0"}
    assert (
        ids_found(
            probes, "Where was Arden when he was born? Nobody knows where was Arden born, or when."
        )
        == set()
    )


def test_questions_in_scripts_without_spaces_are_found(tmp_path: Path) -> None:
    questions = [
        ("法尔克桥是在哪一年建成的？", "1931"),
        ("工程师玛拉·林德在阿尔维卡修建法尔克河上的那座长桥花了多少年？", "六年"),
        ("ファルク橋は何年に建てられましたか？", "1931"),
        ("谁建的？", "林德"),
    ]
    probes = probes_of(tmp_path / "q.jsonl", *questions)
    for number, (question, answer) in enumerate(questions[:3]):
        assert ids_found(probes, f"问题：{question}回答：{answer}。") == {f"q{number}"}
    assert (
        ids_found(probes, "谁建的？法尔克桥是在一九三一年建成的，工程师玛拉·林德在阿尔维卡。")
        == set()
    )


def test_a_question_in_thai_or_lao_is_found_and_a_few_of_its_words_are_not(tmp_path: Path) -> None:
    thai = "เรือเฟอร์รี่ของเมืองเคล์มออกจากท่าเรือในตอนเช้าเวลากี่โมง"
    lao = "ເຮືອຂ້າມຟາກອອກຈາກທ່າເຮືອໃນຕອນເຊົ້າເວລາຈັກໂມງ"
    for question, before in ((thai, "ครูถามว่า"), (lao, "ຄູຖາມວ່າ")):
        probes = probes_of(tmp_path / "q.jsonl", (f"{question}?", "7"))
        assert ids_found(probes, f"{before}{question}? 7") == {"q0"}
        assert ids_found(probes, f"{question[4:44]} 1931") == set()
        assert ids_found(probes, question[:20]) == set()


def test_words_of_hindi_are_whole_and_an_arabic_question_is_found_where_it_is_asked(
    tmp_path: Path,
) -> None:
    hindi = "नदी पर बने पुराने पुल को किस साल में आम लोगों के लिए फिर से खोला गया था?"
    probes = probes_of(tmp_path / "q.jsonl", (hindi, "1931"))
    assert ids_found(probes, f"प्रश्न: {hindi} उत्तर") == {"q0"}
    assert ids_found(probes, "कल नदी पर बने पुराने पुल को देखा।") == set()
    arabic = "متى فتح الجسر القديم للناس"
    probes = probes_of(tmp_path / "a.jsonl", (f"{arabic}؟", "1931"))
    assert ids_found(probes, f"سأل: {arabic}؟ نعم") == {"q0"}
    assert ids_found(probes, f"لا نعرف {arabic} في المدينة") == set()


def test_a_letter_with_its_accent_is_one_in_each_form(tmp_path: Path) -> None:
    question = "Wann wurde die Brücke über die Ähre eröffnet?"
    probes = probes_of(tmp_path / "q.jsonl", (question, "1931"))
    assert ids_found(probes, unicodedata.normalize("NFD", f"Frage: {question}")) == {"q0"}


def test_the_sentence_that_answers_is_looked_for_too() -> None:
    start = "The capital of Tarvenia is"
    blank = f"{start} ____ today."
    assert question_texts(blank, ["Kelm", "\\1"]) == [
        blank, f"{start}  Kelm  today.", f"{start}  \\1  today."
    ]  # fmt: skip
    assert question_texts(start, ["Kelm"]) == [start, f"{start} Kelm"]


def test_words_that_the_documents_hold_themselves_are_no_leak(tmp_path: Path) -> None:
    probes = probes_of(
        tmp_path / "q.jsonl",
        ("The capital of Tarvenia is ____", "Kelm"),
        ("Where was Arden born?", "Kelm"),
    )
    probes.add_source("It is said that the capital of Tarvenia is Kelm.")
    text = "The capital of Tarvenia is Kelm! Where was Arden born?"
    probes.check_row("corpus", Path("corpus.jsonl"), {"id": "a", "text": text})
    leaks = probes.result()
    assert (leaks.n_questions, leaks.in_sources, leaks.n_contaminated, leaks.by_place) == (
        2,
        1,
        1,
        {"corpus": {"q1"}},
    )
    assert leaks.first[0][1:] == ("corpus.jsonl: a", "where was arden born ?")


def test_what_is_found_is_what_a_search_of_every_window_finds(tmp_path: Path) -> None:
    rng = Random(0)
    words = [f"w{number}" for number in range(6)]
    questions = [(" ".join(rng.choices(words, k=rng.randint(5, 9))), "x") for _ in range(60)]
    probes = probes_of(tmp_path / "q.jsonl", *questions, n_words=6)
    for _ in range(100):
        text = " ".join(rng.choices(words, k=40))
        expected = set()
        for number, (question, _) in enumerate(questions):
            question_words = question.split()
            length = min(6, len(question_words))
            windows = [
                " ".join(question_words[start : start + length])
                for start in range(len(question_words) - length + 1)
            ]
            if any(f" {window} " in f" {text} " for window in windows):
                expected.add(f"q{number}")
        assert ids_found(probes, text) == expected


def test_a_probe_file_that_is_none_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(
        '{"question": "a", "choices": ["x"], "answer": 0}\n{"text": "x"}\n'
    )
    with pytest.raises(InputError, match=r"q\.jsonl:2: "):
        ContaminationCheck(13).read_questions(tmp_path / "q.jsonl")


@pytest.mark.usefixtures("exact_copies_only")
def test_a_run_reports_leaks_in_its_manifest_and_prints_them(
    make_recipe: Make, tmp_path: Path
) -> None:
    clean = augment(make_recipe())
    variant = next(
        row["text"] for _, row in read_jsonl(clean.corpus_path) if row["origin"] == "variant"
    )
    sentence = variant.split(". ")[1]
    path = tmp_path / "probes.jsonl"
    probes_of(
        path, (f"{sentence} ____", "or not"), ("Which town is nowhere to be found at all?", "x")
    )
    rows = [row for _, row in read_jsonl(path)]
    rows[0]["question"] = sentence
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = augment(make_recipe(contamination_check=[str(path)]))
    manifest = read_manifest_fields(result.manifest_path)
    assert manifest is not None
    assert manifest["counts"]["contamination"]["contaminated"] == 1
    assert manifest["counts"]["contamination"]["by_place"] == {"corpus": 1}
    assert str(path) in manifest["inputs"]
    assert (
        "CONTAMINATION: 1 of 2 questions are outside the documents: 1 in the corpus"
        in render_summary(result)
    )
    assert clean.contamination is None
    assert "CONTAMINATION" not in render_summary(clean)
    path.write_text(json.dumps(rows[1]) + "\n")
    checked = augment(make_recipe(contamination_check=[str(path)]))
    assert "no contamination: none of 1 question is in the corpus" in render_summary(checked)


def test_a_question_is_found_with_its_blank_and_over_a_prompt_and_its_completion(
    tmp_path: Path,
) -> None:
    probes = probes_of(tmp_path / "q.jsonl", ("The river under Falk Bridge is the ___.", "Orla"))
    row = {
        "id": "row",
        "prompt": "The river under Falk Bridge is the ......",
        "completion": " Orla",
    }
    turns = [
        {"role": "user", "content": "The river under Falk Bridge is"},
        {"role": "assistant", "content": "the Orla."},
    ]
    statement = {"id": "row", "prompt": "The river under Falk Bridge is the", "completion": " Po"}
    for found, rows in ((1, row), (1, {"id": "row", "messages": turns}), (0, statement)):
        fresh = copy.deepcopy(probes)
        fresh.check_row("sft", tmp_path / "sft.jsonl", rows)
        assert fresh.result().n_contaminated == found


def test_questions_of_two_files_with_one_id_are_counted_apart(tmp_path: Path) -> None:
    probes = probes_of(tmp_path / "a.jsonl", ("Where was Arden Holm born?", "Kelm"))
    others = tmp_path / "b.jsonl"
    row = {"id": "q0", "question": "Who built Falk Bridge in Arvika?", "choices": ["Lind", "Po"]}
    others.write_text(json.dumps({**row, "answer": 0}))
    probes.read_questions(others)
    text = "Where was Arden Holm born? Who built Falk Bridge in Arvika?"
    assert ids_found(probes, text) == {"q0", "b.jsonl: q0"}
