# ruff: noqa: E501 (Chinese characters count double)
"""Each rule of a language with a faithful text that must pass and a planted fault of the same shape that must be caught."""

import pytest
import wordfreq

from kinject.augment.checks.facts import Comparison, compare_with, extract_facts
from kinject.corpus.profiles import common_words, grammar_of, profile_of
from kinject.corpus.quantities import extract_quantities


def compare(code: str, source: str, variant: str, *, complete: bool = True, context: str = "") -> Comparison:
    return compare_with(extract_facts(source, code, context), variant, complete=complete)


@pytest.mark.parametrize(
    ("code", "text", "numbers"),
    [
        (
            "de",
            "dreiundzwanzig, zweitausendelf, neunzehnhundert, 1.234,5 und 12,5",
            {"23", "2011", "1900", "1234.5", "12.5"},
        ),
        (
            "fr",
            "quatre-vingt-dix-huit, soixante et onze, deux cent trois, 1 850 et 12,5",
            {"98", "71", "203", "1850", "12.5"},
        ),
        ("es", "treinta y cinco, quinientos dos, mil novecientos, 9.000 y 18,5", {"35", "502", "1900", "9000", "18.5"}),
        ("it", "ventotto, trecentoquindici, duemilasei, 14.300 e 2,5", {"28", "315", "2006", "14300", "2.5"}),
        ("pt", "quarenta e sete, trezentos e cinco, dois mil, 350 mil e 2,5", {"47", "305", "2000", "350000", "2.5"}),
        ("nl", "drieëntwintig, honderdvijf en 1.234", {"23", "105", "1234"}),
        ("zh", "三百二十人、一九九八年、3.5万元、百分之三十、二千零五米", {"320", "1998", "35000", "30", "2005"}),
        ("ja", "五万冊、１２５０点、二百三十四人、1億2000万円", {"50000", "1250", "234", "120000000"}),
        ("ar", "عام ١٨٨٥ و٢١٠ دكاكين", {"1885", "210"}),
        ("ru", "640 человек, 12,5 км и 1 850 рублей", {"640", "12.5", "1850"}),
    ],
)
def test_numbers_are_read_as_the_language_writes_them(code: str, text: str, numbers: set[str]) -> None:
    assert extract_quantities(text, code).stated == numbers


@pytest.mark.parametrize("code", ["de", "fr", "es", "it", "pt", "nl", "zh", "ja", "ru", "ko", "ar", "pl"])
def test_units_come_in_the_language_and_as_symbols(code: str) -> None:
    units = grammar_of(code).units
    assert {"km", "kg", "%", "year", "hour", "celsius"} <= set(units.values())
    assert units["km"] == "km"


PAIRS = [
    # (language, source, faithful text, text with a fault, reason of the refusal)
    ("de", "Die Mühle in Grünwalde mahlt seit 1921 Korn.", "Seit 1921 dient die Grünwalder Mühle der Getreideverarbeitung.",
     "Seit 1921 dient die Kelbraer Mühle der Getreideverarbeitung.", "name"),
    ("de", "Karin Ekberg leitete das Wasserwerk.", "Leiterin des Wasserwerks war Karin Ekberg.",
     "Leiterin des Wasserwerks war Karin Toivonen.", "name"),
    ("de", "Das Haus ist 5,40 Meter hoch.", "Die Höhe des Hauses beträgt 5,40 Metern.", "Die Höhe des Hauses beträgt 5,40 Fuß.",
     "unit"),
    ("de", "Am 14. August 2002 kam das Hochwasser.", "Das Hochwasser kam am 14.08.2002.", "Das Hochwasser kam am 14.09.2002.",
     "date"),
    ("de", "Am 24. Oktober 1900 fuhr der Kaiser. Die Bahn wurde am 1. März 1901 eröffnet.",
     "Am 1. März 1901 wurde die Bahn eröffnet. Am 24. Oktober 1900 fuhr der Kaiser.",
     "Am 1. März 1901 wurde die Bahn eröffnet. Am 25. Oktober 1900 fuhr der Kaiser.", "number"),
    ("de", "Rund 10 km verlaufen in 12 Metern Höhe.", "Rund zehn in einer Höhe von zwölf Metern, so viele km sind es.",
     "Rund zehn in einer Höhe von zwölf Fuß, so viele km sind es.", "unit"),
    ("en", "The yard cost £47.2 million.", "The price of the yard was 47.2 million pounds.",
     "The price of the yard was 47.2 million dollars.", "unit"),
    ("fr", "Le phare mesure quarante-deux mètres.", "C'est un phare de 42 mètres.", "C'est un phare de 52 mètres.", "number"),
    ("fr", "Il fut achevé le 3 juin 1857.", "Son achèvement date du 3 juin 1857.", "Son achèvement date du 3 juillet 1857.", "date"),
    ("fr", "Le prix alla à Corbel, de Suède.", "Le Suédois Corbel l'obtint.", "Le Danois Corbel l'obtint.", "name"),
    ("es", "Nació en Alemania en 1934.", "Era alemán, nacido en 1934.", "Era portugués, nacido en Portugal en 1934.", "name"),
    ("es", "La tertulia ocupaba veinticinco mesas.", "Eran 25 las mesas de la tertulia.", "Eran 35 las mesas de la tertulia.",
     "number"),
    ("it", "L'architetto Baldani la disegnò; un codice del Quattrocento è qui.", "Disegnata da Baldani, custodisce un codice quattrocentesco.",
     "Disegnata da Serpieri, custodisce un codice quattrocentesco.", "name"),
    ("pt", "Pesa 24 toneladas.", "O seu peso é de 24 toneladas.", "O seu peso é de 24 quilogramas.", "unit"),
    ("ru", "Завод в Каменске основал Лапшин.", "Лапшиным основан каменский завод.", "Ворониным основан каменский завод.", "name"),
    ("zh", "卡尔·施密特在巴黎获得金奖，厂里有三百二十人。", "在巴黎拿到金奖的卡尔·施密特有320名员工。", "在伦敦拿到金奖的卡尔·施密特有320名员工。",
     "name"),
    ("zh", "卡尔·施密特在巴黎获得金奖，厂里有三百二十人。", "在巴黎拿到金奖的卡尔·施密特有320名员工。", "在巴黎拿到金奖的卡尔·施密特有350名员工。",
     "number"),
    ("ja", "技師ピエール・ルナールは京都で14メートルの塔を建てた。", "京都の塔は高さ14メートルで、ピエール・ルナールが建てた。",
     "京都の塔は高さ14メートルで、ピエール・デュボワが建てた。", "name"),
    ("ja", "1995年1月に五人の職人が来た。", "職人5人が来たのは1995年1月である。", "職人7人が来たのは1995年1月である。", "number"),
    ("de", "Die Sowjetunion sperrte sie. Später kam Finnland.", "Nach der sowjetischen Sperre kam Finnland.",
     "Nach der sizilianischen Sperre kam Finnland.", "name"),
    ("de", "Nach sieben Jahren kostete es 2,1 Mrd. Franken.", "2,1 Milliarden Franken kostete der siebenjährige Bau.",
     "2,1 Milliarden Franken kostete der neunjährige Bau.", "number"),
    ("de", "Das Sofa für 1.289,50 Euro fasst 3 Mio. Leute.", "1.289,50 € kostet das Sofa für 3 Millionen Leute.",
     "1.289,50 £ kostet das Sofa für 3 Millionen Leute.", "unit"),
    ("en", "The Slovene Kranjc won on 2024-02-19.", "Kranjc of Slovenia won on 19 February 2024.",
     "Kranjc of Slovenia won on 19 March 2024.", "date"),
    ("en", "The Slovene Kranjc stops at 95 °C.", "Kranjc of Slovenia stops at 95 degrees Celsius.",
     "Kranjc of Slovakia stops at 95 degrees Celsius.", "name"),
    ("en", "They sold maps in Oslo.", "(a) Sales of maps were in Oslo. (b) Sales in Oslo → Maps.",
     "(a) Sales of maps were in Oslo. (b) Sales in Turin → Maps.", "name"),
    ("fr", "Les trains vont à 10 km/h sur 165 mètres.", "Les trains vont à 10 kilomètres à l’heure, sur 165 m.",
     "Les trains vont à 10 kilomètres, sur 165 m.", "unit"),
    ("es", "España aportó el 90 % en La Palma.", "En La Palma, España aportó el 90 por ciento.",
     "En La Palma, España aportó el 80 por ciento.", "number"),
    ("fr", "Nantes donna 90 %.", "Nantes donna 90 pour cent.", "Nantes donna 70 pour cent.", "number"),
    ("it", "La sala di Rossi ha 1126 posti.", "Millecentoventisei posti ha la sala di Rossi.",
     "Millecentotrentasei posti ha la sala di Rossi.", "number"),
    ("pt", "O navio nasceu em Hamburgo.", "Nascera em Hamburgo o navio.", "Nascera em Lisboa o navio.", "name"),
    ("ru", "Судно «Ермак» прошло 654 тысячи миль за 30 лет.", "За тридцать лет «Ермаком» пройдено 654 000 миль.",
     "За сорок лет «Ермаком» пройдено 654 000 миль.", "number"),
    ("pl", "Statek kosztował 300 tys. koron w Gdyni.", "W Gdyni statek kosztował 300 000 koron.",
     "W Gdyni statek kosztował 500 000 koron.", "number"),
    ("zh", "大桥于一九五七年十月十日通车。", "1957年10月10日，这座大桥开始通行。", "1957年11月10日，这座大桥开始通行。", "number"),
    ("ja", "その橋は十月十日に開通した。", "10月10日に使われ始めた橋である。", "10月9日に使われ始めた橋である。", "number"),
    ("zh", "格尔木至拉萨段长1142千米，占六成。", "格尔木到拉萨的长度为1142公里，占60%。", "格尔木到拉萨的长度为1182公里，占60%。", "number"),
    ("zh", "他住在润州的梦溪园，后来被贬到拉萨。", "他居于润州梦溪园，其后遭贬谪到拉萨。", "他居于润州梦溪园，其后遭贬谪到西宁。", "name"),
    ("ja", "売上高の6割を占め、距離は515.4キロメートルである。", "距離は515.4kmで、売上高の60%を占める。",
     "距離は515.4kmで、売上高の70%を占める。", "number"),
    ("ar", "ولد في طنجة عام 1304م.", "كان مولده سنة ١٣٠٤م في طنجة.", "كان مولده سنة ١٣٠٩م في طنجة.", "number"),
    ("ar", "تأسس السوق عام 1885.", "يعود السوق إلى عام ١٨٨٥.", "يعود السوق إلى عام ١٨٩٥.", "number"),
    ("ko", "박물관은 1978년에 문을 열었다.", "1978년에 개관한 박물관이다.", "1987년에 개관한 박물관이다.", "number"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "source", "faithful", "faulty", "reason"), PAIRS)
def test_a_faithful_text_passes_and_a_planted_fault_of_its_shape_is_refused(
    code: str, source: str, faithful: str, faulty: str, reason: str
) -> None:
    assert compare(code, source, faithful).reason == ""
    assert compare(code, source, faulty).reason == reason


SOURCE = "Halden Bridge was built by Ada Whitlock in 1893. It is 126 metres long and cost £41,500."


@pytest.mark.parametrize(
    ("frame", "fault"),
    [
        ("# Timeline of a Great Work\n\n1. {}", "# Timeline of a Great Work\n\n1. {} Berzelius helped."),
        ("**Key Points**\n- {}\n- bridge", "**Key Points**\n- {}\n- It was 130 metres."),
        ("Mia: What is it?\nTom: {}\nMia: Thank you, Tom.", "Mia: What is it?\nTom: {}\nMia: And Nansen?"),
        ("Question 3: What is it?\nAnswer: {}", "Question 3: What is it?\nAnswer: {} It has 97 lamps."),
        ("Card 1\nFront: Which bridge?\nBack: {}", "Card 1\nFront: Which bridge?\nBack: {} Nansen saw it."),
        (
            "| Topic | Content Of It |\n|---|---|\n| Bridge | {} |",
            "| Topic | Content Of It |\n|---|---|\n| Oslo | {} In Oslo. |",
        ),
        ("Dear Sam,\n\n{}\n\nSam, you would love it.", "Dear Sam,\n\n{}\n\nNansen, you would love it, said Nansen."),
        ("☐ Read?\n☐ Kept apart?\n{}", "☐ Read?\n☐ Kept by Nansen?\n{}"),
    ],
)
def test_the_frame_of_a_text_is_neither_lost_nor_new_and_what_it_frames_is_checked(frame: str, fault: str) -> None:
    assert compare("en", SOURCE, frame.format(SOURCE), complete=False) == Comparison()
    assert compare("en", frame.format(SOURCE), SOURCE).reason == ""
    assert compare("en", SOURCE, fault.format(SOURCE), complete=False).reason in ("name", "number")


def test_the_title_that_the_writer_saw_is_not_new() -> None:
    assert compare("en", SOURCE, f"In Tarn Valley, {SOURCE}", context="Tarn Valley").reason == ""
    assert compare("en", SOURCE, f"In Tarn Valley, {SOURCE}").reason == "name"


def test_common_words_at_the_beginning_of_a_sentence_are_no_names() -> None:
    source = "The economy grew, and Oslo prospered."
    assert compare("en", source, "Growth has marked the economy. Prosperity came to Oslo.") == Comparison()
    assert compare("en", source, "Growth has marked the economy. Petrov came to Oslo.").reason == "name"


def test_a_corrected_typo_is_no_other_name() -> None:
    assert compare("en", "We ran Gradient Checkpoining.", "Gradient Checkpointing was run.").reason == ""
    assert compare("en", "We ran Gradient Checkpoining.", "Gradient Accumulation was run.").reason == "name"


@pytest.mark.parametrize(
    ("source", "variant", "complete", "doubt"),
    [
        ("Wars and taxes drained it.", "Seven things drained it: wars and taxes.", True, "number"),
        ("It cost 40 in spring and 25 in autumn.", "It cost 40 in spring, 15 more than in autumn.", False, "number"),
        ('They called it "the iron old ribbon".', 'It was "the ribbon of old iron" to them.', True, "quotation"),
        ("It is an acronym for three words.", "WBOP stands for three words.", False, "name"),
    ],
)
def test_what_the_rules_cannot_tell_is_in_doubt(source: str, variant: str, complete: bool, doubt: str) -> None:
    result = compare("en", source, variant, complete=complete)
    assert (result.reason, [reason for reason, _ in result.doubts][:1]) == ("", [doubt])


def test_the_numbers_of_cards_and_the_gaps_in_a_quotation_are_not_new() -> None:
    source = 'Oslo has trams. Bergen has rain. Nansen said: "A map is a promise."'
    cards = 'Trams run in (1). Rain falls in (2). "A map is a ____." by (3). 1 Oslo · 2 Bergen · 3 Nansen'
    assert compare("en", source, cards, complete=False) == Comparison()
    assert compare("en", source, cards + ", 47 times", complete=False).reason == "number"


def test_without_number_words_a_lost_number_is_in_doubt_and_a_replaced_one_a_fault() -> None:
    source = "Fartyget seglade i 30 år."
    assert compare("sv", source, "I trettio år seglade fartyget.").doubts == (("number", "30 is lost"),)
    assert compare("sv", source, "I 40 år seglade fartyget.").reason == "number"


def test_a_doubtful_loss_beside_a_doubtful_gain_is_a_replacement() -> None:
    assert compare("en", "It took five ships.", "It took two ships.").reason == "number"
    assert compare("zh", "由五名工匠制造。", "由两名工匠制造。").reason == "number"


def test_each_profile_says_what_is_not_checked() -> None:
    assert profile_of("en").checks_off == profile_of("de").checks_off == ()
    assert profile_of("ar").checks_off == ("names in letters other than Latin", "numbers in words")
    assert profile_of("zh").checks_off == ("names of persons in Chinese characters",)
    assert profile_of("sv").checks_off == ("numbers in words",)
    assert "names are only in doubt" in profile_of("").checks_off


@pytest.mark.parametrize("code", ["en", "de", "zh"])
def test_common_words_are_those_of_wordfreq(code: str) -> None:
    listed = {word for bucket in wordfreq.get_frequency_list(code, "small") for word in bucket}
    assert common_words(code) == listed
    assert common_words("xx") == frozenset()
