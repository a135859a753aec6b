"""What a text adds to its passage is found; what it says in another form, and what it leaves out, is none."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from kinject.augment.checks.additions import find_addition, source_facts, without_additions
from small import load_benchmark

planted_facts = load_benchmark("augment/planted_facts.py")
PASSAGES = [
    json.loads(line)
    for line in Path(__file__)
    .parents[3]
    .joinpath("benchmarks/augment/passages.jsonl")
    .read_text("utf-8")
    .splitlines()
]


def _found(source: str, text: str, title: str = "") -> tuple[str, str]:
    addition = find_addition(source_facts(source, title), text)
    return (addition.reason, addition.detail) if addition else ("", "")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("Mara Lind built it in 1931.", "It was built."),  # what is left out is no addition
        ("The wheel weighs 1,200 kg.", "The wheel has a weight of 1.2 tonnes, i.e. twelve hundred kilograms."),
        ("It began on March 3, 1931.", "It began on the 3rd of March 1931, in the 1930s, in the 20th century."),
        ("He was born in 1483 and died in 1546.", "He lived for 63 years."),
        ("There are 489 Catholic and 214 other schools with 63,519 teachers.", "The 703 others have some 64,000 teachers."),
        ("The Mongols of Mongolia fought.", "The Mongol army fought, and Mongolian riders did."),
        ("He left Poland.", "The Polish officer left."),
        ("The World Health Organization met.", "The WHO met."),
        ("It sells silicon.", "## Great Sales of Silicon\n\n**Strong Growth:** silicon is sold."),  # titles have capitals
        ("The bridge cost 3.4 million crowns.", "## A bridge for 3.4 million crowns\n\nThat was paid for it."),
        ("Die Brücke hat 8,7 Millionen Kronen gekostet.", "## 8,7 Millionen Kronen für die Brücke\n\nSo viel hat sie gekostet."),
        ("Le pont a coûté 4 600 couronnes.", "## Un pont de 4 600 couronnes\n\nIl a coûté cette somme."),
        ("The bridge was costly.", "### 2.1.3 The Bridge\n\nIt was costly."),  # numbers of sections
        ("It sells silicon.", "1. It sells silicon.\n2. Silicon is sold.\n3. Sold is silicon."),
        ("The song is new.", 'The "hit" is new.'),  # a term in quotation marks
        ("A writer of three books.", "Three books have one writer, and two of them sold."),  # a small count
        ("Die Brücke steht in Arvika.", "In Arvika befindet sich das Bauwerk, eine Straßenbrücke."),
        ("La tour mesure 120 m.", "C'est une tour de 120 mètres."),
        ("门票60元，老人半价。", "门票为60元，老人30元。"),
        ("水車の重さは4トンである。", "水車は四トンの重さがある。"),
        ("It holds 48,730 books.", "It holds some 50,000 books."),
        ("The road of 2.4 km took 3 years.", "The road of 2,400 m took 36 months."),
        ("The file has 3 GB.", "The file has 3,072 MB."),
        ("Between 6.5 and 9 million live there.", "From 6.5 million up to 9 million live there."),
        ("From 6.5 million up to 9 million live there.", "Between 6.5 and 9 million live there."),
        ("Sales (€m): 18.", "It sold for 18 million euros."),
        ("It cost $31m.", "It cost 31 million dollars."),
        ("It cost A$31.", "It cost $31."),
        ("It cost SEK 31.", "It cost 31 kronor."),
        ("学校去年为新礼堂支付了¥31。", "去年学校在新礼堂上花费了31元。"),
        ("The dam cost ₹8 crore.", "For the dam they paid 80 million rupees."),
        ("Elle vend pour 31 millions d'euros.", "Elle vend pour 31 M€."),
        ("1,347 guests came.", "1.347 guests came."),  # the point of another language
        ("She wrote in the 18th century.", "She wrote in the 1700s."),
        ("The press RX-45 prints.", "The RX45 prints, and other RX45s."),
        ("A broken meter is replaced within 30 days.", "A second meter was sent after 30 days."),
    ],
)  # fmt: skip
def test_the_same_facts_in_another_form_are_no_addition(source: str, text: str) -> None:
    assert _found(source, text) == ("", "")


@pytest.mark.parametrize(
    ("source", "text", "reason", "detail"),
    [
        ("Mara Lind built it in 1931.", "Mara Lind built it in 1932.", "number", "1932 is not in the source"),
        ("She has three cats.", "She has four cats.", "number", "4 is not in the source"),
        ("It was in May 1931.", "It was in June 1931.", "date", "June is not in the source"),
        ("On 3 May it rained.", "On 5 May it rained.", "number", "5 is not in the source"),
        ("They met on 3 May and 5 June.", "They met on 5 May.", "date", "5 May is not in the source"),
        ("It rose by 31%.", "It rose by 31 percentage points.",
         "unit", "31 percentage point: the source has 31 with %"),
        ("Die Quote stieg im Jahr um 31 Prozentpunkte.", "Sie stieg im Jahr um 31 Prozent.",
         "unit", "31 %: the source has 31 with percentage point"),
        ("It cost ₪31.", "It cost $31.", "unit", "31 dollar: the source has 31 with shekel"),
        ("It cost 31 PLN.", "It cost EUR 31.", "unit", "31 euro: the source has 31 with zloty"),
        ("ホールの建設に₩31を支払った。", "ホールの建設に$31を支払った。",
         "unit", "31 dollar: the source has 31 with won"),
        ("It is 12 km away.", "It is 12 miles away.", "unit", "12 mile: the source has 12 with km"),
        ("Mara Lind built it.", "Mara Lind built it with Karin Ekberg.", "name", "Karin is not in the source"),
        ("It flew.", "The A220 flew.", "name", "A220 is not in the source"),
        ("It is long.", "It is two metres long.", "number", "2 is not in the source"),
        ("He agreed.", 'He said, "We shall never surrender to them."', "quotation",
         "'We shall never surrender to them.' is not in the source"),
        ("It has 400 boats.", "It has 500 boats.", "number", "500 is not in the source"),
        ("It has 52,000 books.", "It has 60,000 books.", "number", "60000 is not in the source"),
        ("The wall of 2.4 m.", "The wall of 24 m.", "number", "24 is not in the source"),
        ("A road of 6 km.", "A road of 600 m.", "number", "600 is not in the source"),
        ("A part of 9 kg.", "A part of 90 g.", "number", "90 is not in the source"),
        ("It holds 7 mice.", "It holds 7 million mice.", "number", "7000000 is not in the source"),
        ("She is 1 of two.", "She is of the 70s.", "number", "70s is not in the source"),
        ("The press KL730 prints.", "The press KL73 prints.", "name", "KL73 is not in the source"),
        ("The press KL7301 prints.", "The press KL7302 prints.", "name", "KL7302 is not in the source"),
        ("It has a 512 wall.", "The A512 has it.", "name", "A512 is not in the source"),
        ("Es steht in Arvika.", "Es steht in Kelmstadtby.", "name", "Kelmstadtby is not in the source"),
        ("Elle vit à Lyon.", "Elle vit à Marseille.", "name", "Marseille is not in the source"),
        ("他在柏林工作了很多年。", "他在巴黎工作了很多年。", "name", "巴黎 is not in the source"),
        ("彼は東京に住む。", "彼はスペインに住む。", "name", "スペイン is not in the source"),
        ("Elle coûte 31 millions d'euros.", "Son prix est de 31 millions de dollars.",
         "unit", "31000000 dollar: the source has 31000000 with euro"),
        ("Cuesta seis mil millones de euros.", "Su precio es de seis mil millones de dólares.",
         "unit", "6000000000 dollar: the source has 6000000000 with euro"),
        ("Он жил в Москве.", "Он жил в Лондоне.", "name", "Лондоне is not in the source"),
    ],
)  # fmt: skip
def test_an_addition_is_named(source: str, text: str, reason: str, detail: str) -> None:
    assert _found(source, text) == (reason, detail)


def test_the_title_that_the_writer_saw_is_no_addition() -> None:
    assert _found("It opened.", "Falk Bridge opened in 1931.", "The Falk Bridge, 1931") == ("", "")


@pytest.mark.parametrize("language", planted_facts.LANGUAGES)
def test_planted_errors_are_found(language: str) -> None:
    texts = [row["text"] for row in PASSAGES if row["language"] == language]
    names = [name for text in texts for name in planted_facts.find_names(text, language)]
    n_planted = n_found = 0
    for text in texts:
        assert _found(text, text) == ("", "")
        for kind in (*planted_facts.FACT_KINDS, "invention"):
            for seed in range(6):
                others = [name for name in names if name not in text]
                wrong = planted_facts.plant_error(kind, text, Random(seed), others, language)
                if wrong is not None:
                    n_planted += 1
                    n_found += _found(text, wrong) != ("", "")
    assert n_found >= 0.88 * n_planted


def test_the_items_of_a_list_that_add_something_are_taken_off_and_a_paragraph_is_left_whole() -> (
    None
):
    source = source_facts("Mara Lind built the Falk Bridge in 1931.")
    text = "1. Mara Lind built a bridge.\n2. It is in Paris.\n3. The bridge is of 1931.\n"
    kept, added = without_additions(source, text)
    assert (kept, [item.detail for item in added]) == (
        "1. Mara Lind built a bridge.\n3. The bridge is of 1931.", ["Paris is not in the source"],
    )  # fmt: skip
    paragraph = "Mara Lind built a bridge. It is in Paris."
    assert without_additions(source, paragraph) == (paragraph, [])
    mostly = "1. It is in Paris.\n2. It is in Rome.\n3. Mara Lind built it."
    assert without_additions(source, mostly) == (mostly, [])
