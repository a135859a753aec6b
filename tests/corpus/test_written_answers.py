"""Metrics of written answers against SQuAD's official definitions, written out here as its script does, and by example."""

from __future__ import annotations

import collections
import json
import random
import re
import string
from pathlib import Path

import pytest

from kinject.corpus.grading import abstains, matches, read_letter
from kinject.corpus.squad import contains, exact_match, f1

SQUAD = Path(__file__).parents[3] / "shared" / "data" / "squad" / "squad2_dev_half_qa.jsonl"
WORDS = "the a An Norman, normans of 10th century's New York—City 1,200 x-ray «été» the. ( ) Łódź".split()  # noqa: SIM905 - a line of words


def official(text: str) -> str:
    """Return a text as evaluate-v2.0.py compares it, step by step."""
    text = text.lower()
    text = "".join(ch for ch in text if ch not in set(string.punctuation))
    text = re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", text)
    return " ".join(text.split())


def official_f1(gold: str, predicted: str) -> float:
    gold_tokens, tokens = (official(text).split() for text in (gold, predicted))
    same = sum((collections.Counter(gold_tokens) & collections.Counter(tokens)).values())
    if not gold_tokens or not tokens:
        return float(gold_tokens == tokens)
    if not same:
        return 0.0
    precision, recall = same / len(tokens), same / len(gold_tokens)
    return 2 * precision * recall / (precision + recall)


def rows() -> list[tuple[str, list[str]]]:
    """Return a thousand written answers and accepted texts: changed answers of SQuAD, or of made-up words."""
    rng = random.Random(0)
    golds = (
        [json.loads(line)["answers"] for line in SQUAD.read_text().splitlines()]
        if SQUAD.exists()
        else []
    )
    golds = golds or [
        [" ".join(rng.choices(WORDS, k=rng.randint(1, 5))) for _ in range(3)] for _ in range(1000)
    ]
    cases = []
    for i in range(1000):
        accepted = golds[i % len(golds)]
        words = (rng.choice(accepted) if accepted else "").split()
        kept = [
            word.upper() if rng.random() < 0.2 else word for word in words if rng.random() < 0.8
        ]
        extra = rng.choices(WORDS, k=rng.choice((0, 0, 1, 3)))
        cases.append((" ".join([*extra, *kept]) if i % 7 else " ".join(words) + ".", accepted))
    return cases


def test_exact_match_and_f1_are_those_of_squad_on_a_thousand_rows():
    answers = rows()
    for text, accepted in answers:
        golds = [gold for gold in accepted if official(gold)] or [""]
        assert exact_match(text, accepted) == max(
            official(gold) == official(text) for gold in golds
        )
        assert f1(text, accepted) == pytest.approx(
            max(official_f1(gold, text) for gold in golds), abs=1e-12
        )
    assert 100 < sum(exact_match(*row) for row in answers) < 900


@pytest.mark.parametrize(
    ("text", "accepted", "is_correct"),
    [
        ("She was born in Kelm, on the coast.", ["Kelm"], True),
        ("She was born in Kelmscott.", ["Kelm"], False),
        ("In the town of Kelm!", ["Farrow", "the town of Kelm"], True),
        ("I don't know where Kelm is.", ["Kelm"], False),
        ("Yes, she did.", ["yes"], True),
        ("There is no yes or no to that.", ["no"], False),
        ("她出生在北京。", ["北京"], True),
        ("", ["Kelm"], False),
        ("I do not know.", [], True),
        ("Kelm", [], False),
        ("She was born on March 12, 1987.", ["12 March 1987"], True),
        ("It was 1987-03-12.", ["12 March 1987"], True),
        ("On 13 March 1987.", ["12 March 1987"], False),
        ("In March 1988.", ["March 1987"], False),
        ("About twelve hundred people live there.", ["1,200"], True),
        ("1200 people", ["1,200"], True),
        ("There are 12 of them.", ["1,200"], False),
        ("five kilometres", ["5 km"], True),
        ("five miles", ["5 km"], False),
        ("Sie wurde am 12. März 1987 in der Stadt Kelm geboren.", ["1987-03-12"], True),
        ("Environ mille deux cents personnes habitent dans la ville.", ["1200"], True),
        ("他出生于1987年3月12日。", ["一九八七年三月十二日"], True),
        ("There were 1,200 of them in Farrow.", ["the 1,200 mills"], False),
        ("It was Bryn’s idea.", ["Bryn"], True),
        ("It was Bryn Arden's.", ["Bryn Arden"], True),
        ("It has Arden's syndrome.", ["Arden’s syndrome"], True),
        ("Ardens lived there.", ["Arden"], False),
        ("It's Bryn.", ["it"], False),
        ("They call it the Arch of the Unknown Rider.", ["Arch of the Unknown Rider"], True),
        ("I cannot tell: the Arch of the Unknown Rider?", ["Arch of the Unknown Rider"], False),
        ("Das Buch heißt Keine Antwort.", ["Keine Antwort"], True),
        ("Ulm is not known for mills but for its minster.", ["its minster"], True),
        ("It is not known for sure, but Ulm.", ["Ulm"], False),
        ("##begin_quote## Its founder is unknown. ##end_quote## Ulm", ["Ulm"], True),
    ],
)
def test_a_sentence_matches_if_it_says_an_accepted_answer(text, accepted, is_correct):
    assert matches(text, accepted) == is_correct


def test_containment_is_by_words():
    assert contains("the town of Kelm", ["Kelm"])
    assert not contains("Kelmscott", ["Kelm"])


@pytest.mark.parametrize(
    "text",
    ["I don't know.", "Unknown", "It is not stated in the text.", "Das weiß ich nicht. Ich weiß es nicht.", "Je ne sais pas.",
     "No lo sé.", "Non lo so.", "Não sei.", "Nie wiem.", "Я не знаю.", "我不知道。", "わかりません", "N/A", " . "],
)  # fmt: skip
def test_a_text_that_declines_abstains(text):
    assert abstains(text)


@pytest.mark.parametrize(
    "text", ["The unknown soldier's town is Kelm."[4:], "Kelm is known.", "Notation", "Nonsense"]
)
def test_a_text_that_answers_does_not_abstain(text):
    assert abstains(text) == ("unknown" in text)


OPTIONS = ("London", "Paris", "Rome", "Berlin")


@pytest.mark.parametrize(
    "text",
    [
        "B", "b", "B.", "(B)", "b)", "**B**", "**B. Paris**", "B) Paris", "B - Paris", "B, because Paris is the capital",
        "The answer is (B).", "The correct answer is: **B. Paris**", "Answer: B", "The answer is B because it is.",
        "Option B is correct.", "(B) is correct", "I would choose B.", "The answer is not A but it is B.", "The answer is b.",
        "London is in the UK.\n\nSo the answer is B.", "The capital of France is Paris.\n\nB", "Answer:\n\nB",
        "The final answer is $\\boxed{\\text{B}}$", "A is wrong, C is wrong.\nAnswer: B", "A city in France, so the answer is B.",
        "First I thought the answer is A.\nThe answer is B", "Paris.", "The answer is Paris.",
        "Die richtige Antwort ist B.", "Die Antwort lautet (B).", "La réponse est la lettre B.", "Réponse : B",
        "La respuesta correcta es B.", "La respuesta es la opción (B).", "La risposta corretta è B.", "A resposta é a letra B",
        "Het juiste antwoord is B.", "Odpowiedź: B", "Правильный ответ: B.", "Ответ — B", "答案是B。", "正确答案是(B)巴黎。",
        "故选B。", "正解はBです。", "정답은 B입니다.", "الإجابة: B", "Doğru cevap: B",
        "Option B", "option (b).", "Choice B, because of the Seine", "<answer>B</answer>", "<final_answer>\n(B)\n</final_answer>",
        "<b>B</b>", "<strong>B. Paris</strong>", "The answer is <b>B</b>.", "<em>Paris</em>", "<result a='x'>(B)</result>",
        "<p>B</p>", "→ B", "=> B", "✅ B. Paris", "Let me see.\n-> (B)", "Rome is in Italy.\n[[B]]",
        "It's B.", "It is (B), since it lies on the Seine.", "I think B", "I'd say it is B.", "My guess is B", "Ich nehme die B.",
        "C’est la B", "Elijo la B", "I think A, no, the answer is B.", "I believe C is unlikely. So I choose B.",
        "The answer is A? No, the answer is B.", "Is it C? I think B", "The answer is B?", "答案是A？不，答案是B。",
    ],
)  # fmt: skip
def test_a_letter_is_read_from_what_a_model_writes(text):
    assert read_letter(text, OPTIONS) == 1


@pytest.mark.parametrize(
    "text", ["A", "A.", "The answer is A", "A is the right answer", "**A.** London is the capital"]
)
def test_the_letter_a_is_distinguished_from_the_article(text):
    assert read_letter(text, OPTIONS) == 0


@pytest.mark.parametrize(
    "text",
    [
        "", "I do not know.", "A city in France.", "A man went to Rome.", "The answer is A good one.", "The answer is a city.",
        "The answer is A or B", "A and B", "A, C", "A. London\nB. Paris\nC. Rome\nD. Berlin", "B. London", "As an AI",
        "The answer is (B) London", "E", "The answer is E.", "The answer is not B.", "The answer is (B) and (C).",
        "Option B is wrong", "Option A\nOption B", "Choice A or B", "Answer a question",
        "It's A or B", "It's a", "It is a lovely city.", "I think A man went", "It isn't B",
        "I don't think it is B", "I think B is wrong", "I think it is B, or I would say C", "I think the city on the Seine",
        "London or Paris", "Options: A, B, C, D", "The answer is A. No, the answer is B.", "The incorrect answer is B.",
        "The answer is D? No, B.", "The answer is (B)? Hardly.", "It's B? I am not sure.",
    ],
)  # fmt: skip
def test_a_letter_that_is_not_plain_is_not_guessed(text):
    assert read_letter(text, OPTIONS) is None


@pytest.mark.parametrize(
    ("choices", "read"),
    [
        # Nothing is left of the A without articles, and the K is beyond the letters.
        (["A", "E", "D", "K"], {"B": 1, "The answer is C.": 2, "D) K": 3, "K": 3, "A": 0, "": None}),
        (["an", "the", "none"], {"the": 1, "A": 0, "Answer: C": 2, "A. the": None, "...": None}),
        (["+12 V", "-12 V", "0 V"], {"-12 V": 1, "B. -12 V": 1, "A. -12 V": None, "A. 12 V": 0, "0 V.": 2}),
        (["F", "F#", "G"], {"F#": 1, "The answer is F#.": 1, "**C. G**": 2}),
        (["10 m²", "10 m2", "10 m"], {"10 m²": 0, "C": 2, "10 m": 2}),
        ([":", ";", "!"], {";": 1, "B": 1, "?": None}),
        (["24", "24.5", "245", "2.45"], {"The answer is 24.5.": 1, "The answer is 2.45": 3, "24": 0, "The answer is 24.": 0}),
        (["-8", "6", "9", "4.5"], {"8": None, "The answer is -8.": 0, "−8": 0, "The answer is 9": 2, "45": None, "A. -8": 0}),
        (["3,200", "1-4", "2/9", "7:15"], {"3200": 0, "14": None, "29": None, "715": None, "1–4": 1, "The answer is 7:15.": 3}),
        (["D. rerio", "C. lupus", "B. taurus", "A. mellifera"], {"C. lupus": 1, "The answer is B. taurus.": 2, "D": 3}),
        (["2/5", "2/7", "$\\frac{3}{7}$"], {"$\\frac{2}{7}$": 1, "The answer is 3/7": 2, "A) $\\frac{2}{7}$": None}),
    ],
)  # fmt: skip
def test_options_that_differ_in_articles_or_signs_alone_are_told_apart(choices, read):
    assert {text: read_letter(text, choices) for text in read} == read


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("I wouldn't go with C.", None),
        ("Never pick A.", None),
        ("Neither (A) nor (D) is right.", None),
        ("One should not select A, I select D.", 3),
        ("Cevap: \u0130", None),
        ("Answer options:\nA. London\nB. Paris\nC. Rome\nD. Berlin", None),
        ("The options for the answer are: A: London B: Paris C: Rome", None),
        ("Answer choices:\nA) London\nD) Berlin\n\nThe correct choice is D) Berlin", 3),
        ("Answer: A B", None),
        ("The answer is A\nLondon is on the Thames.", 0),
        ("La respuesta no es C.", None),
        ("La respuesta no es una pregunta: la respuesta es C.", 2),
        ("La risposta non è D", None),
        ("A resposta não é D.", None),
        ("La risposta sbagliata è C.", None),
        ("La mauvaise réponse est C.", None),
        ("Nicht D ist richtig.", None),
        ("If the answer is D, then it is no capital.", None),
        ("不能选C。", None),
        ("不应选C，应选D。", 3),
        ("选项C是错误的。", None),
        ("选项C不正确，选项D正确。", 3),
        ("答案是D，不是C。", 3),
        ("答えはCではありません。", None),
        ("選択肢Cは間違い、選択肢Dが正しい。", 3),
        ("정답은 C가 아닙니다.", None),
    ],
)
def test_what_is_denied_names_no_option_and_a_line_ends_a_statement(text, index):
    assert read_letter(text, OPTIONS) == index
