"""Numbers, dates and units in the forms that languages have for them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kinject.language.tables import language_of
from kinject.language.values import read_values


@pytest.mark.parametrize(
    ("code", "text", "numbers"),
    [
        (
            "en",
            "1,200 men, two hundred and three cows, nineteen ninety-five, 3.5 million",
            {"1200", "203", "1995", "3500000"},
        ),
        (
            "en",
            "thirteen and seventeen; five thousand and two; the 1990s",
            {"13", "17", "5002", "1990s"},
        ),
        ("en", "from 1933–35, at 8:30 and 2031-04-07", {"1933", "1935", "8:30", "2031", "7"}),
        (
            "en",
            "part 5312-04, pages 2811-2813 and 1914-18",
            {"5312", "4", "2811", "2813", "1914", "1918"},
        ),
        (
            "de",
            "4.500 Euro, dreiundzwanzig Kühe, 3 Mio. Euro, 2,5 Tonnen",
            {"4500", "23", "3000000", "2.5"},
        ),
        ("fr", "quatre-vingt-dix-huit ans, soixante et onze, 1 500 francs", {"98", "71", "1500"}),
        ("es", "dos mil millones de euros, treinta y cuatro", {"2000000000", "34"}),
        ("it", "millecentoventisei, centottantatré", {"1126", "183"}),
        ("zh", "三百二十人，4.5万吨，二〇二一年，百分之七十", {"320", "45000", "2021", "70"}),
        ("ja", "五人の職人、3割2分、14時30分", {"5", "32", "14:30"}),
        ("ja", "7割以上が来た。4割引", {"70", "40"}),
        ("zh", "四成五的船，百分之八十二点五，四分之三", {"45", "82.5", "3", "4"}),
        ("ru", "двадцать пять рублей, 3 млн тонн", {"25", "3000000"}),
        ("en", "7 crore; two lakh fifty; ₹1,25,000", {"70000000", "200050", "125000"}),
        ("en", "1.4 lakh crore rupees, 6 thousand million", {"1400000000000", "6000000000"}),
        (
            "en",
            "$8b, £2tn, EUR 9m, Rs.30 cr",
            {"8000000000", "2000000000000", "9000000", "300000000"},
        ),
        ("es", "8 MM€ y 9 MM de euros", {"8000000", "9000000"}),
        ("en", "$8MM, $7mm", {"8000000", "7000000"}),
        ("pt", "R$ 8 mi, US$ 7 bi", {"8000000", "7000000000"}),
        ("fr", "7 MdEUR, 3 Mds d'euros, 41 MEUR", {"7000000000", "3000000000", "41000000"}),
        ("de", "320 Tsd. Euro, 18 TEUR", {"320000", "18000"}),
        ("es", "3 mil millones de euros", {"3000000000"}),
        ("hi", "8 करोड़ रुपये, 2 लाख करोड़, ६ हज़ार", {"80000000", "2000000000000", "6000"}),
        ("ne", "3 करोड", {"30000000"}),
        ("ko", "2억 3천만 원, 4만 5000명, 제8조", {"230000000", "45000", "8"}),
        ("ja", "2億3千万円", {"230000000"}),
        ("bn", "9 কোটি", {"90000000"}),
        ("ar", "ألف وثمانمئة وسبعة وستون، تسعة وعشرين يوما، أربعة عشر", {"1867", "29", "14"}),
        ("ar", "ستة آلاف جندي و٣ سفن في القرن الثامن عشر", {"6000", "3", "18"}),
    ],
)
def test_numbers_are_read_as_the_language_writes_them(
    code: str, text: str, numbers: set[str]
) -> None:
    assert read_values(text, code).numbers.keys() >= numbers


@pytest.mark.parametrize("text", ["a wall of 9 m", "a load of 7 t", "Nashville, TN, at 6 b"])
def test_a_letter_without_a_currency_is_no_million(text: str) -> None:
    (number,) = read_values(text).numbers
    assert len(number) == 1


@pytest.mark.parametrize(
    ("code", "text", "number", "unit"),
    [
        ("en", "5 km", "5", "km"), ("en", "five kilometres", "5", "km"), ("en", "$30", "30", "dollar"),
        ("de", "5 Kilometern", "5", "km"),
        ("fr", "90 pour cent", "90", "%"), ("zh", "12公里", "12", "km"), ("ja", "12キロメートル", "12", "km"),
        ("sv", "5 kilometer", "5", "km"),
    ],
)  # fmt: skip
def test_units_come_in_the_language_and_as_symbols(
    code: str, text: str, number: str, unit: str
) -> None:
    assert unit in read_values(text, code).numbers[number]


@pytest.mark.parametrize(
    ("code", "text"),
    [("en", "March 3, 1931"), ("en", "the 3rd of March"), ("en", "1931-03-03"), ("de", "3. März"), ("de", "3.3.1931"),
     ("fr", "le 3 mars"), ("es", "3 de marzo"), ("zh", "1931年3月3日"), ("ja", "三月三日"),
     ("hi", "3 मार्च 1931"), ("hi", "३ मार्च")],
)  # fmt: skip
def test_dates_are_months_with_days(code: str, text: str) -> None:
    assert read_values(text, code).days == {(3, 3)}


def test_may_and_march_are_months_beside_a_year_only() -> None:
    assert read_values("In May 1931 they may march.").months == {5}
    assert read_values("May we march? The 14 may, until 3 MARCH.").months == {3}


def test_each_language_says_what_is_not_checked() -> None:
    assert language_of("en").not_checked == language_of("de").not_checked == ()
    assert language_of("ar").not_checked == ("names in letters other than Latin",)
    assert language_of("he").not_checked == (
        "names in letters other than Latin",
        "numbers in words",
    )
    assert language_of("zh").not_checked == ("names of persons in Chinese characters",)
    assert language_of("sv").not_checked == ("numbers in words",)


@pytest.mark.parametrize("code", ["en", "de", "zh"])
def test_common_words_are_those_of_wordfreq(code: str) -> None:
    import wordfreq

    assert wordfreq.top_n_list(code, 50, wordlist="small")[0] in language_of(code).common
    assert Path(importlib.util.find_spec("wordfreq").origin).exists()  # type: ignore[union-attr, arg-type]
