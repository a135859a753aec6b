from random import Random

import pytest

from kinject.augment.checks.facts import Comparison, compare_facts
from kinject.augment.checks.planted_errors import FACT_KINDS, plant_error
from kinject.corpus.quantities import extract_quantities
from kinject.sandbox.grammar import render_entry
from kinject.sandbox.people import create_country


@pytest.mark.parametrize(
    ("source", "variant"),
    [
        ("It holds 1,000 seats.", "One thousand seats are in it; 1000 in all."),
        ("On March 3, 1999 it sank.", "It sank on the 3rd of March 1999."),
        ("On 1999-03-03 it sank.", "It sank on 3 March 1999."),
        ("It ran from 1 to 5 May 2023.", "It ran May 1–5, 2023, for five days."),
        ("From 1990–95 it was shut.", "It was shut between 1990 and 1995."),
        ("It is 5 km long.", "Its length is five kilometres."),
        ("Winds of 35 miles per hour blew.", "Winds blew at 35mph."),
        ("It cost $5 million.", "Its price was 5,000,000 dollars."),
        ("It rose 10%.", "The rise was ten percent."),
        ("The fortieth council met.", "The 40th council met."),
        ("In the 1990s it grew for two weeks.", "For a fortnight in the 1990s it grew."),
        ("It stood over 80 years.", "It stood more than eight decades."),
        ("More than a dozen metres high.", "Over 12 metres high."),
        ("She has two sons.", "Both of her sons live."),
        ("It opened in nineteen ninety-five.", "It opened in 1995."),
        ("Wu of NASA met Zorgon in Haiti.", "The Haitian visit joined Zorgon and NASA's Wu."),
        ("The firm works on artificial intelligence in Rome.", "The Roman firm works on AI."),
        ("He visited the United Nations in the U.S. then.", "He then went to the UN in the United States."),
        ("The Zorgon–Calidus pact held.", "The pact of Zorgon and Calidus held."),
        ("King Louis XIV lived there.", "Louis the 14th, the king, lived there."),
        ('Her motto was "Preserve and protect." It stuck.', "“Preserve and protect” stuck as her motto."),
        ("The council met in Paris.", "Meanwhile, in Paris, the council met. Clear skies prevailed."),
        ("Café Müller in Malmö burned.", "A fire took Cafe Muller, Malmo."),
        ("The A220s and B52 flew.", "An A220 and the B52 flew."),
        ("In the late 1990s it grew.", "It grew in the late 90s."),
        ("It opened in 2017 and made a profit in 2018.", "It opened in 2017 and made a profit the next year."),
        ("It closed in 1901, and in 1902 it burned.", "It burned in 1902, having closed the year before."),
        ("It was hidden for three decades.", "For three long decades it was hidden."),
        ("It sold well in Asian markets.", "Sales in Asiatic markets were good."),
        ("It is a step for music beyond Earth.", "It is a step for interplanetary music."),
        ("Astronomers and Geo-Scientists came.", "Geoscientists and astronomers came."),
        ("In March 2026 Kim met Cook. May I add?", "Kim met Cook (March of that year, 2026). May I add?"),
        ("They march. May Smith left.", "May Smith left; they march."),
        ("By 14 February 2077 the rebels held Helium.", "The rebels held Helium by Valentine’s Day 2077."),
        ("They met on New Year's Eve in Oslo.", "On 31 December they met in Oslo."),
        ("The Anglo-Swiss firm Astro grew.", "Astro, a firm from the UK and Switzerland, grew."),
        ("The seats by SpaceForm are comfortable.", "Comfort was given by the seats of SpaceForm."),
    ],
)
def test_the_same_facts_in_another_form_are_the_same(source: str, variant: str) -> None:
    result = compare_facts(source, variant)
    assert (result.reason, result.detail) == ("", "")


@pytest.mark.parametrize(
    ("source", "variant", "reason", "expected"),
    [
        ("It holds 1,000 seats.", "It holds 1,100 seats.", "number", "1000 is lost"),
        ("It holds many seats.", "It holds 90 seats.", "number", "90 is not in the source"),
        ("It was won in 1999.", "It was won.", "number", "1999 is lost"),
        ("It grew in the 1990s.", "It grew in the 80s.", "number", "1990s is lost"),
        ("It was won in 1999.", "It was won the next year.", "number", "1999 is lost"),
        ("In March 2026 Kim met Cook.", "Kim met Cook in 2026.", "date", "March is lost"),
        ("Since May 2026 Kim waits.", "Since June 2026 Kim waits.", "date", "May is lost"),
        ("By 13 February they held Helium.", "By Valentine's Day they held Helium.", "number", "13 is lost"),
        (
            "On 3 May they met.",
            "They met on 3 May, on Christmas Eve in fact.",
            "name",
            "Christmas is not in the source",
        ),
        ("The hall was comfortable.", "Komfort was in the hall.", "name", "Komfort is not in the source"),
        ("She has two sons.", "She has four sons.", "number", "4 is not in the source"),
        ("Voyager 3 left 1 base.", "Voyager 1 left 3 bases.", "number", "Voyager is with 1"),
        ("It sank on 3 March.", "It sank on 3 May.", "date", "March is lost"),
        ("On 3 March and 5 May.", "On 5 March and 3 May.", "date", "5 March is not in the source"),
        ("It is 5 km long.", "It is 5 miles long.", "unit", "5 mile: the source has 5 with km"),
        ("It took ten years.", "It took ten months.", "unit", "10 month"),
        ("For a decade it stood.", "For ten months it stood.", "unit", "10 month"),
        ('He said "never again" then.', "He said it then.", "quotation", "'never again' is lost"),
        ("He said it then.", 'He said "never again" then.', "quotation", "'never again' is not in the source"),
        ("It lies in Haiti, near Gonaives.", "It lies in Haiti.", "name", "Gonaives is lost"),
        ("It lies in Haiti.", "It lies in Haiti, near Gonaives.", "name", "Gonaives is not in the source"),
        ("The mayor was Wu. He left.", "The mayor was Wu. Petrov left.", "name", "Petrov is not in the source"),
        ("The mayor was Wu.", "The mayor was Wu. Anna Petrov agreed.", "name", "Anna is not in the source"),
        ("Louis XIV lived there.", "Louis XVI lived there.", "name", "XIV is lost"),
        ("The B52 flew.", "The B51 flew.", "name", "B52 is lost"),
    ],
)
def test_a_lost_or_new_fact_is_named(source: str, variant: str, reason: str, expected: str) -> None:
    result = compare_facts(source, variant)
    assert result.reason == reason
    assert expected in result.detail


def test_facts_may_be_lost_where_only_new_ones_count() -> None:
    assert compare_facts('In 1999 Wu of Rome said "no" 5 times.', "Wu spoke.", complete=False).reason == ""
    assert compare_facts("In 1999 Wu spoke.", "In 1998 Wu spoke.", complete=False).reason == "number"


@pytest.mark.parametrize("kind", FACT_KINDS)
def test_planted_errors_are_refused(kind: str) -> None:
    source = (
        "The Lindholm Bridge in Arvika was opened on 12 June 1931 by Karin Ekberg. It is 215 metres long, cost $4 million and "
        "was built in three years by the Falk Company, which employed 900 men. On May 4, 1944 a storm named Hilda closed it "
        "for 11 days. Today 8,500 cars cross it, and Arvika counts 26 percent more visitors than in 1990."
    )
    assert compare_facts(source, source) == Comparison()
    for seed in range(40):
        wrong = plant_error(kind, source, Random(seed), ["Berzelius", "Toivonen", "Nansen"])
        assert wrong is not None
        assert compare_facts(source, wrong).reason, wrong


def test_words_spell_numbers() -> None:
    text = (
        "five thousand and two; one hundred and five; twenty-one; nineteen ninety-five; seven, then nine; two million"
    )
    assert set(extract_quantities(text).numbers) == {"5002", "105", "21", "1995", "7", "9", "2000000"}


def test_every_sandbox_entry_keeps_its_own_facts() -> None:
    for person in create_country(n_known=1, n_new=50).new:
        first, second = render_entry(person, 1), render_entry(person, 2)
        if ("Tarvenian" in first) == ("Tarvenian" in second):
            assert compare_facts(first, second) == Comparison()


@pytest.mark.parametrize(
    ("source", "variant", "complete"),
    [
        (
            "The ferry leaves at 7.45 am and is back at 18:00.",
            "The ferry leaves at a quarter to eight and is back at six.",
            True,
        ),
        (
            "Two thirds of the price was paid in cash and the rest in shares.",
            "One third of the price was paid in shares.",
            False,
        ),
        ("The plant employs 342 people in Bergen and 165 in Voss.", "The plant employs 507 people.", False),
        ("Each boot weighs 640 g and costs 90 euros.", "A pair weighs 1.28 kg.", False),
        (
            "In 1933 he saw the bridge; the following year he wrote on it.",
            "What he wrote on the bridge came out in 1934.",
            False,
        ),
        (
            "Sales rose by 9% to 86.4 million euros in 2022.",
            "The year before, sales were about 79.3 million euros.",
            False,
        ),
        ("The hut is open from 1 May to 31 October.", "The hut is closed in December.", False),
    ],
)
def test_a_number_that_may_follow_from_the_source_is_in_doubt(source: str, variant: str, complete: bool) -> None:
    assert compare_facts(source, variant, complete=complete).reason == ""


@pytest.mark.parametrize(
    ("source", "variant", "reason"),
    [
        ("The plant employs 342 people in Bergen and 165 in Voss.", "The plant employs 613 people.", "number"),
        ("She served as keeper for 29 years and 12 days.", "How long did she serve? As keeper for 17 years.", "number"),
        ("The bridge cost 13,560 euros.", "It cost 13,650 euros.", "number"),
        ("The dose is 20 mg of Nasoxylin.", "Take 20 g of Nasoxylin.", "unit"),
        ("The tower was planned by Jan Vos for the town.", "The tower was planned by Jan Kuyper for the town.", "name"),
    ],
)
def test_a_number_or_name_in_the_place_of_another_is_refused(source: str, variant: str, reason: str) -> None:
    assert compare_facts(source, variant, complete=False).reason == reason


@pytest.mark.parametrize("complete", [True, False])
def test_a_number_of_hundreds_of_digits_is_compared_too(complete: bool) -> None:
    source, variant = f"The code is {'7' * 400} and costs 12 euros.", f"The code is {'9' * 400} and costs 12 euros."
    assert compare_facts(source, variant, complete=complete).reason == "number"


def test_half_past_midnight_is_a_time_of_day() -> None:
    assert compare_facts("The last bus leaves at 0:30.", "The last bus leaves at 00:30.") == Comparison()
