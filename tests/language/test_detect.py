import pytest

from kinject.language import compare_languages, detect_language, find_script

MILL = {
    "en": "The old mill at the river was rebuilt after the fire, and it grinds corn for the whole valley to this day.",
    "de": "Die alte Mühle am Fluss wurde nach dem Brand wieder aufgebaut und mahlt bis heute Korn für das ganze Tal.",
    "fr": "Le vieux moulin au bord de la rivière a été rebâti après l'incendie et moud encore le blé de toute la vallée.",
    "es": "El viejo molino junto al río fue reconstruido tras el incendio y todavía muele el grano de todo el valle.",
    "it": "Il vecchio mulino sul fiume fu ricostruito dopo l'incendio e macina ancora oggi il grano di tutta la valle.",
    "pt": "O velho moinho junto ao rio foi reconstruído depois do incêndio e ainda hoje mói o milho de todo o vale.",
    "zh": "河边的老磨坊在火灾之后重新修建，直到今天仍然为整个山谷磨玉米，附近的居民都很喜欢它。",
    "ja": "川のほとりの古い水車小屋は火事のあとに建て直され、今日でも谷じゅうのトウモロコシをひいています。",
    "ru": "Старая мельница на берегу реки была восстановлена после пожара, и сегодня она работает для жителей всей долины.",
    "ar": "أعيد بناء الطاحونة القديمة على ضفة النهر بعد الحريق، وما زالت تطحن الذرة للوادي كله حتى اليوم.",
    "ko": "강가의 오래된 방앗간은 화재 뒤에 다시 지어졌고 오늘날까지 온 골짜기의 옥수수를 빻고 있습니다.",
}


@pytest.mark.parametrize("code", MILL)
def test_a_sentence_of_twenty_words_has_its_language(code: str) -> None:
    assert detect_language(MILL[code]) == code
    assert [other for other, text in MILL.items() if compare_languages(MILL[code], text)] == [
        other for other in MILL if other != code
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   \n",
        "Mill",
        "42 km/h 1931",
        "Die Mühle",
        "|---|\n| FP 16 | 69 |",
        "河",
        "\ud800\x00" * 30,
    ],
)
def test_a_short_text_or_one_without_words_has_no_language(text: str) -> None:
    assert detect_language(text) == ""


def test_a_mixed_text_has_no_language_and_is_never_a_change() -> None:
    mixed = f"{MILL['en']} {MILL['de']}"
    assert detect_language(mixed) == ""
    assert compare_languages(mixed, MILL["de"]) == compare_languages(MILL["fr"], mixed) == ""


def test_characters_that_the_detector_cannot_read_do_not_stop_it() -> None:
    assert detect_language(f"\x00\x07\ufffe\ud800{MILL['it']}\x9f") == "it"


def test_the_script_decides_where_the_language_is_not_clear() -> None:
    texts = ("Ümit 7", "мир", "東京タワー", "12")
    assert [find_script(text) for text in texts] == ["Latin", "Cyrillic", "Japanese", ""]
    assert compare_languages("Mount Roaring, 7859 feet.", "Гора высокая.") == "Cyrillic for Latin"


def test_a_close_language_that_the_detector_takes_for_the_other_is_no_change() -> None:
    spanish = MILL["es"]
    galician = "O vello muíño xunto ao río foi reconstruído despois do incendio e aínda moe o millo de todo o val."
    assert detect_language(galician) == "gl"
    assert compare_languages(spanish, galician) == ""
    assert compare_languages(MILL["de"], galician) == "gl for de"
