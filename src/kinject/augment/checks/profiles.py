# ruff: noqa: E501 (a table of words, in which Chinese characters count double)
"""Language profiles: what the checks know of a language. A new language is one entry in `_TABLE`.

Names of months, units, countries and cities, and the decimal sign, come from CLDR (through Babel), for every language. How
common a word is comes from wordfreq. An entry adds what they lack: number words, words that imply a number, and which
words are names.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import msgpack

NameRule = Literal["capitals", "nouns", "han", "kana", "latin"]
"""How names are recognized: by a capital inside a sentence; as German does it, where every noun has a capital; in Chinese; in
Japanese; only where they are in Latin letters."""


@dataclass(frozen=True)
class Profile:
    """What the checks know of a language.

    `code` is its ISO 639-1 code, "" for an unknown language. `names` is the rule for names. `numbers` has number words as
    ``value word word ...; ...``: a word that ends in ~ takes each of the `endings`. `scales` are factors, written alike.
    `joins` stand between the words of a number; with `compound`, number words are written as one word. `added_to` are tens to
    which French adds 10 to 19. `ambiguous` number words have another, common meaning. `implied` has words that imply a
    number; `units` more spellings of units, ``unit: word|word``; `regions` places that CLDR lacks.
    """

    code: str
    names: NameRule = "capitals"
    numbers: str = ""
    endings: tuple[str, ...] = ()
    scales: str = ""
    joins: tuple[str, ...] = ()
    compound: bool = False
    added_to: tuple[int, ...] = ()
    ambiguous: frozenset[str] = frozenset()
    ordinal: str = ""
    implied: str = ""
    units: Mapping[str, str] = field(default_factory=dict)
    regions: str = ""

    @property
    def checks_off(self) -> tuple[str, ...]:
        """What is not checked in this language, for the manifest and the summary."""
        off = []
        if not self.code:
            off.append("names are only in doubt")
        elif self.names == "latin":
            off.append("names in letters other than Latin")
        elif self.names in ("han", "kana"):
            off.append("names of persons in Chinese characters")
        if not self.numbers and self.names not in ("han", "kana"):
            off.append("numbers in words")
        return tuple(off)

    @cached_property
    def number_words(self) -> dict[str, int]:
        """Word -> value."""
        return {word: int(value) for value, word in self._entries(self.numbers)}

    @cached_property
    def scale_words(self) -> dict[str, int]:
        """Word -> factor."""
        return {word: int(value) for value, word in self._entries(self.scales)}

    @cached_property
    def implied_numbers(self) -> dict[str, set[str]]:
        """Word -> numbers that it may replace."""
        numbers: dict[str, set[str]] = {}
        for value, word in self._entries(self.implied):
            numbers.setdefault(word, set()).add(value)
        return numbers

    def _entries(self, text: str) -> Iterator[tuple[str, str]]:
        for entry in filter(None, (part.split() for part in text.split(";"))):
            for word in entry[1:]:
                for ending in self.endings if word.endswith("~") else ("",):
                    yield entry[0], word.removesuffix("~") + ending

    @cached_property
    def _locale(self) -> Any:
        """CLDR's data, None for an unknown language. Babel takes a quarter of a second to import, and English needs none."""
        from babel import Locale, UnknownLocaleError

        try:
            return Locale.parse(self.code)
        except (UnknownLocaleError, ValueError):
            return None

    @cached_property
    def month_names(self) -> dict[str, int]:
        """Name of a month in lower case -> 1 to 12."""
        if self.code == "en":
            return {name: number for number, name in enumerate(_ENGLISH_MONTHS.split(), 1)}
        names = self._locale.months["format"]["wide"] if self._locale else {}
        return {name.lower(): number for number, name in names.items() if not name[0].isdigit()}

    @cached_property
    def months(self) -> dict[str, int]:
        """Name or abbreviation of a month in lower case -> 1 to 12."""
        if self.code == "en":
            return self.month_names | {name[:3]: number for name, number in self.month_names.items()} | {"sept": 9}
        short = self._locale.months["format"]["abbreviated"] if self._locale else {}
        names = {name.lower().rstrip("."): number for number, name in short.items() if not name[0].isdigit()}
        return names | self.month_names

    @cached_property
    def decimal_sign(self) -> str:
        """The sign before the decimals."""
        if self.code == "en" or self._locale is None:
            return "."
        return str(self._locale.number_symbols["latn"]["decimal"])

    @cached_property
    def unit_of(self) -> dict[str, str]:
        """Spelling of a unit in lower case -> unit."""
        spellings = dict(SHARED_UNITS)
        for unit, word in self._cldr_units():
            if len(word) > 1 or self.names in ("han", "kana"):
                spellings.setdefault(word, unit)
                if self.names == "nouns" and len(word) > 3:  # the dative plural: mit 5 Kilometern
                    spellings.setdefault(f"{word}n", unit)
        for unit, words in self.units.items():
            spellings.update(dict.fromkeys(words.split("|"), unit))
        spellings.pop("", None)
        return spellings

    def _cldr_units(self) -> Iterator[tuple[str, str]]:
        """Yield (unit, spelling in lower case) of this language."""
        if self.code == "en" or self._locale is None:
            return
        from babel.units import UnknownUnitError, format_unit

        for key, unit in _CLDR_UNITS.items():
            for number in (1, 2, 5):
                with contextlib.suppress(UnknownUnitError):
                    for text in (
                        format_unit(number, key, "long", locale=self._locale),
                        format_unit(number, key, "short", locale=self._locale),
                    ):
                        yield unit, _NUMBER.sub("", text).strip().lower()

    @cached_property
    def places(self) -> frozenset[str]:
        """Countries, languages and large cities, in this language and in lower case."""
        if self.code == "en" or self._locale is None:
            return frozenset()
        names = [name for code, name in self._locale.territories.items() if code not in ("001", "ZZ")]
        names += [name for code, name in self._locale.languages.items() if len(code) == 2]
        names += [zone["city"] for zone in self._locale.time_zones.values() if "city" in zone]
        names += self.regions.split()
        return frozenset(name.lower() for name in names if len(name) > 1)

    @cached_property
    def demonyms(self) -> dict[str, set[str]]:
        """Country -> its languages, and language -> its countries, in lower case: Polonia, polaco."""
        if self._locale is None:
            return {}
        from babel.languages import get_official_languages

        related: dict[str, set[str]] = {}
        for territory, country in self._locale.territories.items():
            for code in get_official_languages(territory, de_facto=True):
                language = self._locale.languages.get(code)
                if language:
                    related.setdefault(country.lower(), set()).add(language.lower())
                    related.setdefault(language.lower(), set()).add(country.lower())
        return related

    @property
    def common_words(self) -> frozenset[str]:
        """Words of at least one occurrence in a million, in lower case; none for a language without a list."""
        return common_words(self.code)

    @cached_property
    def common_characters(self) -> frozenset[str]:
        """The most frequent words of one character, in Chinese and Japanese."""
        return frozenset([word for word in _frequent_words(self.code) if len(word) == 1][:120])


@lru_cache(maxsize=16)
def common_words(code: str) -> frozenset[str]:
    """Return the words of a language that occur at least once in a million, in lower case, () without a list of them."""
    return frozenset(_frequent_words(code))


def _frequent_words(code: str) -> list[str]:
    """Return wordfreq's small list, most frequent words first. It is read without importing wordfreq, which takes 0.4 s."""
    spec = importlib.util.find_spec("wordfreq")
    if spec is None or spec.origin is None:
        raise ImportError("wordfreq is not installed. Install kinject again: pip install kinject")
    code = {"hr": "sh", "sr": "sh", "bs": "sh", "no": "nb", "nn": "nb"}.get(code, code)
    path = Path(spec.origin).parent / "data" / f"small_{code}.msgpack.gz"
    if not path.is_file():
        return []
    with gzip.open(path) as file:
        _, *buckets = msgpack.load(file, raw=False)
    return [word for bucket in buckets for word in bucket]


_ENGLISH_MONTHS = "january february march april may june july august september october november december"
_NUMBER = re.compile(r"[\d\u200e\u200f\u061c\u00a0\u202f]+")
_CLDR_UNITS = {
    "length-kilometer": "km", "length-meter": "m", "length-centimeter": "cm", "length-millimeter": "mm",
    "length-mile": "mile", "length-foot": "foot", "length-inch": "inch", "length-yard": "yard", "mass-kilogram": "kg",
    "mass-gram": "g", "mass-milligram": "mg", "mass-tonne": "tonne", "mass-metric-ton": "tonne", "mass-pound": "lb",
    "mass-ounce": "oz", "volume-liter": "litre", "volume-milliliter": "ml", "area-hectare": "hectare", "area-acre": "acre",
    "area-square-kilometer": "km2", "area-square-mile": "mile2", "area-square-meter": "m2", "area-square-foot": "foot2",
    "temperature-celsius": "celsius", "temperature-fahrenheit": "fahrenheit", "speed-kilometer-per-hour": "km/h",
    "speed-mile-per-hour": "mph", "duration-millisecond": "millisecond", "duration-second": "second",
    "duration-minute": "minute", "duration-hour": "hour", "duration-day": "day", "duration-week": "week",
    "duration-month": "month", "duration-year": "year", "duration-decade": "decade", "duration-century": "century",
    "frequency-hertz": "hz", "frequency-kilohertz": "khz", "frequency-megahertz": "mhz", "frequency-gigahertz": "ghz",
    "power-watt": "w", "power-kilowatt": "kw", "power-megawatt": "mw", "power-gigawatt": "gw",
    "electric-volt": "volt", "digital-byte": "byte", "digital-kilobyte": "kb", "digital-megabyte": "mb",
    "digital-gigabyte": "gb", "digital-terabyte": "tb", "concentr-percent": "%",
}  # fmt: skip
"""CLDR's name of a unit -> ours."""

_SYMBOLS_OF_UNITS = {
    "km": "km", "m": "m", "cm": "cm", "mm": "mm", "kg": "kg", "g": "g", "mg": "mg", "litre": "l", "ml": "ml",
    "hectare": "ha", "km2": "km²|km2", "m2": "m²|m2", "celsius": "°c|° c", "fahrenheit": "°f|° f", "degree": "°",
    "km/h": "km/h|kmh", "mph": "mph", "millisecond": "ms", "second": "s|sec", "minute": "min", "hour": "h", "hz": "hz", "khz": "khz", "mhz": "mhz", "ghz": "ghz", "w": "w",
    "kw": "kw", "mw": "mw", "gw": "gw", "volt": "v", "kb": "kb", "mb": "mb", "gb": "gb", "tb": "tb", "%": "%|％",
    "dollar": "dollar|dollars|usd|$|dólar|dólares|dollari|us-dollar|美元|ドル", "sterling": "gbp|£",
    "euro": "euro|euros|eur|€|欧元|ユーロ", "yen": "yen|jpy|日元|円|yens", "yuan": "yuan|cny|元|人民币|元人民币",
}  # fmt: skip
SHARED_UNITS = {spelling: unit for unit, text in _SYMBOLS_OF_UNITS.items() for spelling in text.split("|")}
"""Spelling -> unit, in every language."""

_TABLE = (
    Profile(
        "en", joins=("and",), endings=("", "s"), ordinal=r"(?:st|nd|rd|th)\b",
        numbers="0 zero zeroth; 1 one first; 2 two second; 3 three third; 4 four fourth; 5 five fifth; 6 six sixth; 7 "
        "seven seventh; 8 eight eighth; 9 nine ninth; 10 ten tenth; 11 eleven eleventh; 12 twelve twelfth; 13 "
        "thirteen thirteenth; 14 fourteen fourteenth; 15 fifteen fifteenth; 16 sixteen sixteenth; 17 "
        "seventeen seventeenth; 18 eighteen eighteenth; 19 nineteen nineteenth; 20 twenty twentieth; 30 "
        "thirty thirtieth; 40 forty fortieth; 50 fifty fiftieth; 60 sixty sixtieth; 70 seventy seventieth; 80 "
        "eighty eightieth; 90 ninety ninetieth",
        scales="100 hundred hundredth; 1000 thousand thousandth; 1000000 million millionth; 1000000000 billion "
        "billionth bn; 1000000000000 trillion",
        implied="2 both~ pair~ couple~ twice~ double~ twin~ duo~ fold~ twofold~ half~ second~ fortnight~; 3 triple~ "
        "thrice~ trio~ threefold~; 4 quartet~ quarter~; 0.5 half~; 50 half~ equal~ equally~ even~ evenly~; 25 "
        "quarter~; 10 decade~; 12 dozen~; 14 fortnight~; 100 century~ centenary~; 1000 millennium~; 24 day~; "
        "7 week~; 60 hour~; 1 single~ sole~ once~ first~ one~ only~; 0 no~ none~ zero~ nil~",
        units={
            "km": "km|kms|kilometre|kilometres|kilometer|kilometers",
            "m": "m|metre|metres|meter|meters",
            "cm": "cm|centimetre|centimetres|centimeter|centimeters",
            "mm": "mm|millimetre|millimetres|millimeter|millimeters",
            "mile": "mi|mile|miles",
            "foot": "ft|foot|feet",
            "inch": "inch|inches",
            "yard": "yd|yard|yards",
            "kg": "kg|kgs|kilogram|kilograms|kilogramme|kilogrammes|kilo|kilos",
            "g": "g|gram|grams|gramme|grammes",
            "mg": "mg|milligram|milligrams",
            "tonne": "tonne|tonnes",
            "ton": "ton|tons",
            "lb": "lb|lbs|pound|pounds",
            "oz": "oz|ounce|ounces",
            "litre": "l|litre|litres|liter|liters",
            "ml": "ml|millilitre|millilitres|milliliter|milliliters",
            "gallon": "gal|gallon|gallons",
            "hectare": "ha|hectare|hectares",
            "acre": "acre|acres",
            "km2": "km²|km2|sq km|square kilometre|square kilometres|square kilometer|square kilometers",
            "mile2": "sq mi|square mile|square miles",
            "m2": "m²|m2|sq m|square metre|square metres|square meter|square meters",
            "foot2": "sq ft|square foot|square feet",
            "celsius": "°c|° c|degrees celsius|degree celsius|celsius|degrees centigrade",
            "fahrenheit": "°f|° f|degrees fahrenheit|degree fahrenheit|fahrenheit",
            "degree": "°|degree|degrees",
            "km/h": "km/h|kph|kmh|kilometres per hour|kilometers per hour",
            "mph": "mph|miles per hour",
            "knot": "knot|knots",
            "millisecond": "ms|millisecond|milliseconds",
            "second": "second|seconds|sec|secs",
            "minute": "minute|minutes|min|mins",
            "hour": "hour|hours|hr|hrs",
            "day": "day|days",
            "week": "week|weeks",
            "month": "month|months",
            "year": "year|years|yr|yrs",
            "decade": "decade|decades",
            "century": "century|centuries",
            "hz": "hz|hertz",
            "khz": "khz|kilohertz",
            "mhz": "mhz|megahertz",
            "ghz": "ghz|gigahertz",
            "w": "w|watt|watts",
            "kw": "kw|kilowatt|kilowatts",
            "mw": "mw|megawatt|megawatts",
            "gw": "gw|gigawatt|gigawatts",
            "volt": "v|volt|volts",
            "byte": "byte|bytes",
            "kb": "kb|kilobyte|kilobytes",
            "mb": "mb|megabyte|megabytes",
            "gb": "gb|gigabyte|gigabytes",
            "tb": "tb|terabyte|terabytes",
            "%": "%|percent|per cent|percentage points|percentage point",
            "dollar": "dollar|dollars|usd",
            "euro": "euro|euros|eur",
            "sterling": "pounds sterling|gbp",
            "yen": "yen|jpy",
            "rupee": "rupee|rupees",
            "bc": "bc|bce|b.c.|b.c.e.",
        },
    ),
    Profile(
        "de", "nouns", compound=True, joins=("und",), endings=("e", "er", "en", "es", "em"), ordinal=r"\.(?=\s[^\W\d_])",
        numbers="0 null; 1 ein eins eine einer einem einen eines erst~; 2 zwei zweier zweit~; 3 drei dreier dritt~; 4 vier viert~;"
        "5 fünf fünft~; 6 sechs sechst~; 7 sieben siebt~; 8 acht acht~; 9 neun neunt~; 10 zehn zehnt~; 11 elf elft~;"
        "12 zwölf zwölft~; 13 dreizehn; 14 vierzehn; 15 fünfzehn; 16 sechzehn; 17 siebzehn; 18 achtzehn; 19 neunzehn;"
        "20 zwanzig zwanzigst~; 30 dreißig dreissig dreißigst~; 40 vierzig vierzigst~; 50 fünfzig fünfzigst~; 60 sechzig;"
        "70 siebzig; 80 achtzig; 90 neunzig",
        scales="100 hundert; 1000 tausend; 1000000 million millionen; 1000000000 milliarde milliarden;"
        "1000000000000 billion billionen",
        regions="Schottland England Wales Nordirland Bayern Sachsen Hessen Thüringen Brandenburg Niedersachsen Schleswig-Holstein"
        " Hamburg Bremen München Köln Frankfurt Stuttgart Dresden Leipzig Hannover Nürnberg Tirol Kärnten Steiermark Salzburg"
        " Genf Basel Bern Mailand Venedig Neapel Florenz Genua Sizilien Toskana Burgund Elsass Lothringen Bretagne Normandie"
        " Flandern Böhmen Mähren Schlesien Pommern Ostpreußen Krakau Danzig Posen Breslau Kiew Moskau Petersburg Sibirien"
        " Kalifornien Florida Texas Virginia Chicago Washington Boston Kanton Peking Shanghai Sowjetunion Preußen",
        ambiguous=frozenset(("achten", "achter", "achte", "achtes", "achtem", "erst", "ersten", "zweiten")),
        implied="2 beide beiden beider beides paar doppelt doppelte doppelten zweimal zweifach halb hälfte;"
        "1 einzig einzige einzigen einmal erstmals nur; 3 dreimal dreifach trio drittel; 4 viertel viermal; 12 dutzend;"
        "0.5 halb halbe halben hälfte; 50 hälfte; 25 viertel; 10 jahrzehnt jahrzehnte jahrzehnten; 0 kein keine keinen;"
        "100 jahrhundert jahrhunderte jahrhunderts; 1000 jahrtausend; 24 tag; 7 woche; 60 stunde; 100 hundertjährig",
        units={"year": "jahr|jahre|jahren|jahres|jährig|jährige|jährigen|jähriger", "day": "tag|tage|tagen|tages|tägig|tägige|tägigen",
               "week": "woche|wochen|wöchig", "month": "monat|monate|monaten|monatig", "hour": "stunde|stunden|std.|std|uhr",
               "%": "%|prozent|prozentpunkte|prozentpunkten", "km/h": "km/h|stundenkilometer|stundenkilometern",
               "century": "jahrhundert|jahrhunderts|jahrhunderte|jahrhunderten|jh.", "celsius": "grad celsius|°c", "degree": "grad|°"},
    ),
    Profile(
        "fr", joins=("et",), endings=("", "s"), ordinal=r"(?:ères?|ers?|res?|ndes?|nds?|èmes?|emes?|es?)\b", added_to=(60, 80),
        numbers="0 zéro; 1 un une premier~ première~; 2 deux deuxième~ second~ seconde~; 3 trois troisième~; 4 quatre quatrième~;"
        "5 cinq cinquième~; 6 six sixième~; 7 sept septième~; 8 huit huitième~; 9 neuf neuvième~; 10 dix dixième~;"
        "11 onze onzième~; 12 douze douzième~; 13 treize treizième~; 14 quatorze quatorzième~; 15 quinze quinzième~;"
        "16 seize seizième~; 17 dix-sept dix-septième~; 18 dix-huit dix-huitième~; 19 dix-neuf dix-neuvième~; 20 vingt vingtième~;"
        "30 trente; 40 quarante; 50 cinquante; 60 soixante; 70 septante; 80 quatre-vingt~ huitante; 90 nonante",
        scales="100 cent cents; 1000 mille; 1000000 million millions; 1000000000 milliard milliards",
        ambiguous=frozenset(("neuf", "un", "une", "second", "seconde", "secondes", "premier", "première")),
        implied="2 double doubles deux demi moitié paire couple fois deuxièmement; 10 dizaine dizaines décennie décennies;"
        "12 douzaine douzaines; 15 quinzaine; 20 vingtaine; 100 centaine centaines siècle siècles; 1000 millier milliers;"
        "3 triple trio tiers; 4 quart; 0.5 demi moitié; 50 moitié; 25 quart; 1 seul seule unique; 0 aucun aucune;"
        "2 ambedeux tous; 7 semaine; 14 quinzaine",
        units={"year": "an|ans|année|années", "%": "%|pour cent|pourcent", "century": "siècle|siècles",
               "hour": "heure|heures|h", "degree": "degré|degrés|°", "celsius": "degrés celsius|°c", "tonne": "tonne|tonnes"},
    ),
    Profile(
        "es", joins=("y",), endings=("o", "a", "os", "as", ""), ordinal=r"(?:\.?[ºª°]|\.?er\b|\.?o\b|\.?a\b)",
        numbers="0 cero; 1 un uno una primer~; 2 dos segund~; 3 tres tercer~; 4 cuatro cuart~; 5 cinco quint~; 6 seis sext~;"
        "7 siete séptim~; 8 ocho octav~; 9 nueve noven~; 10 diez décim~; 11 once; 12 doce; 13 trece; 14 catorce; 15 quince;"
        "16 dieciséis; 17 diecisiete; 18 dieciocho; 19 diecinueve; 20 veinte; 21 veintiún veintiuno veintiuna; 22 veintidós;"
        "23 veintitrés; 24 veinticuatro; 25 veinticinco; 26 veintiséis; 27 veintisiete; 28 veintiocho; 29 veintinueve;"
        "30 treinta; 40 cuarenta; 50 cincuenta; 60 sesenta; 70 setenta; 80 ochenta; 90 noventa; 200 doscient~;"
        "300 trescient~; 400 cuatrocient~; 500 quinient~; 600 seiscient~; 700 setecient~; 800 ochocient~; 900 novecient~",
        scales="100 cien ciento; 1000 mil; 1000000 millón millones; 1000000000000 billón billones",
        ambiguous=frozenset(("un", "una", "uno", "segundo", "segunda", "cuarto", "primer", "primera", "primero")),
        implied="2 ambos ambas doble par dos mitad pareja; 10 decena decenas década décadas; 12 docena docenas;"
        "100 centenar centenares siglo siglos; 1000 millar millares miles; 3 triple trío tercio; 4 cuarta cuarto; 0.5 medio media mitad;"
        "50 mitad; 25 cuarto; 1 único única solo sola; 0 ningún ninguna ninguno; 7 semana; 15 quincena",
        units={"year": "año|años", "%": "%|por ciento", "century": "siglo|siglos", "degree": "grado|grados|°",
               "celsius": "grados celsius|°c", "tonne": "tonelada|toneladas"},
    ),
    Profile(
        "it", joins=("e",), compound=True, endings=("o", "a", "i", "e"), ordinal=r"[ºª°]",
        numbers="0 zero; 1 un uno una prim~; 2 due second~; 3 tre tré terz~; 4 quattro quart~; 5 cinque quint~; 6 sei sest~;"
        "7 sette settim~; 8 otto ottav~; 9 nove nono nona; 10 dieci decim~; 11 undici; 12 dodici; 13 tredici; 14 quattordici;"
        "15 quindici; 16 sedici; 17 diciassette; 18 diciotto; 19 diciannove; 20 venti vent; 30 trenta trent; 40 quaranta quarant;"
        "50 cinquanta cinquant; 60 sessanta sessant; 70 settanta settant; 80 ottanta ottant; 90 novanta novant",
        scales="100 cento cent; 1000 mille mila; 1000000 milione milioni; 1000000000 miliardo miliardi",
        ambiguous=frozenset(("un", "uno", "una", "sei", "secondo", "seconda", "prima", "primo", "venti", "vent", "cent")),
        implied="2 entrambi entrambe ambedue doppio doppia coppia paio metà; 10 decina decine decennio decenni; 12 dozzina;"
        "100 centinaio centinaia secolo secoli; 1000 migliaio migliaia; 3 triplo trio terzo; 4 quarto; 0.5 mezzo mezza metà; 50 metà;"
        "25 quarto; 1 unico unica solo sola; 0 nessun nessuno nessuna; 7 settimana; 20 ventina",
        units={"year": "anno|anni", "%": "%|per cento|percento", "century": "secolo|secoli", "degree": "grado|gradi|°",
               "celsius": "gradi celsius|°c", "hour": "ora|ore", "tonne": "tonnellata|tonnellate"},
    ),
    Profile(
        "pt", joins=("e",), endings=("o", "a", "os", "as"), ordinal=r"\.?[ºª°]",
        numbers="0 zero; 1 um uma primeir~; 2 dois duas segund~; 3 três terceir~; 4 quatro quart~; 5 cinco quint~; 6 seis sext~;"
        "7 sete sétim~; 8 oito oitav~; 9 nove nono nona; 10 dez décim~; 11 onze; 12 doze; 13 treze; 14 catorze quatorze; 15 quinze;"
        "16 dezesseis dezasseis; 17 dezessete dezassete; 18 dezoito; 19 dezenove dezanove; 20 vinte; 30 trinta; 40 quarenta;"
        "50 cinquenta; 60 sessenta; 70 setenta; 80 oitenta; 90 noventa; 200 duzent~; 300 trezent~; 400 quatrocent~;"
        "500 quinhent~; 600 seiscent~; 700 setecent~; 800 oitocent~; 900 novecent~",
        scales="100 cem cento; 1000 mil; 1000000 milhão milhões; 1000000000 bilhão bilhões",
        ambiguous=frozenset(("um", "uma", "segundo", "segunda", "quarto", "sexta", "primeiro", "primeira")),
        implied="2 ambos ambas dobro par casal metade; 10 dezena dezenas década décadas; 12 dúzia dúzias; 100 centena centenas século séculos;"
        "1000 milhar milhares; 3 triplo trio terço; 4 quarto; 0.5 meio meia metade; 50 metade; 25 quarto; 1 único única só sozinho;"
        "0 nenhum nenhuma; 7 semana; 15 quinzena",
        units={"year": "ano|anos", "%": "%|por cento", "century": "século|séculos", "degree": "grau|graus|°",
               "celsius": "graus celsius|°c", "tonne": "tonelada|toneladas"},
    ),
    Profile(
        "nl", joins=("en", "ën"), compound=True, ordinal=r"(?:e|ste|de)\b",
        numbers="0 nul; 1 een één eerste; 2 twee tweede; 3 drie derde; 4 vier vierde; 5 vijf vijfde; 6 zes zesde; 7 zeven zevende;"
        "8 acht achtste; 9 negen negende; 10 tien tiende; 11 elf elfde; 12 twaalf twaalfde; 13 dertien dertiende;"
        "14 veertien veertiende; 15 vijftien vijftiende; 16 zestien zestiende; 17 zeventien zeventiende; 18 achttien achttiende;"
        "19 negentien negentiende; 20 twintig twintigste; 30 dertig; 40 veertig; 50 vijftig; 60 zestig; 70 zeventig; 80 tachtig;"
        "90 negentig",
        scales="100 honderd; 1000 duizend; 1000000 miljoen; 1000000000 miljard",
        ambiguous=frozenset(("een", "acht", "eerste")),
        implied="2 beide beiden dubbel paar helft tweemaal; 12 dozijn; 10 decennium decennia; 100 eeuw eeuwen; 0.5 half halve helft;"
        "50 helft; 25 kwart; 1 enige enkel; 0 geen; 7 week",
        units={"year": "jaar|jaren|jarige", "%": "%|procent", "century": "eeuw|eeuwen", "hour": "uur|uren", "degree": "graad|graden|°"},
    ),
    Profile(
        "zh", "han",
        regions="北京 天津 上海 重庆 河北 山西 辽宁 吉林 黑龙江 江苏 浙江 安徽 福建 江西 山东 河南 湖北 湖南 广东 广西 海南 四川 贵州 云南 西藏 陕西"
        " 甘肃 青海 宁夏 新疆 内蒙古 香港 澳门 台湾 台北 广州 深圳 南京 杭州 苏州 武汉 成都 西安 沈阳 大连 青岛 厦门 长沙 郑州 济南 昆明 哈尔滨 苏联"
        " 纽约 华盛顿 旧金山 波士顿 芝加哥 慕尼黑 汉堡 法兰克福 米兰 威尼斯 日内瓦 巴塞罗那 曼彻斯特 利物浦 爱丁堡 苏格兰 英格兰 威尔士 加州 大阪 京都"
        " 横滨 神户 名古屋 北海道 圣彼得堡 孟买", implied="2 双 两 倍 半; 12 打; 0.5 半; 50 半; 10 十 年代; 100 百 世纪; 1 一 唯一 首 单 元; 7 周 星期; 24 天; 60 小时; 0 无 没 零",
        units={"km": "公里|千米", "m": "米", "cm": "厘米|公分", "mm": "毫米", "kg": "公斤|千克", "g": "克", "mg": "毫克", "tonne": "吨|公吨",
               "litre": "升|公升", "ml": "毫升", "hour": "小时|个小时|钟头", "minute": "分钟|分", "second": "秒|秒钟", "day": "天|日|号|昼夜",
               "week": "周|星期|个星期|礼拜", "month": "个月|月", "year": "年|岁|周年|周岁|年代", "century": "世纪|个世纪", "degree": "度|°", "mile": "英里",
               "foot": "英尺", "inch": "英寸", "celsius": "摄氏度|℃|°c", "hectare": "公顷", "km2": "平方公里|平方千米", "m2": "平方米", "lb": "磅",
               "%": "%|％", "acre": "英亩", "mu": "亩", "li": "里", "decade": "个年代"},
    ),
    Profile(
        "ja", "kana",
        regions="北海道 青森 岩手 宮城 秋田 山形 福島 茨城 栃木 群馬 埼玉 千葉 東京 神奈川 新潟 富山 石川 福井 山梨 長野 岐阜 静岡 愛知 三重 滋賀 京都"
        " 大阪 兵庫 奈良 和歌山 鳥取 島根 岡山 広島 山口 徳島 香川 愛媛 高知 福岡 佐賀 長崎 熊本 大分 宮崎 鹿児島 沖縄 札幌 仙台 横浜 川崎 名古屋 神戸"
        " 北九州 金沢 鎌倉 北京 上海 台北 香港",
        implied="2 両 二人 双 倍 半 ふた 二つ; 0.5 半; 50 半; 10 十 年代; 100 百 世紀; 1 一 ひと 唯一 単 初; 7 週; 24 日; 60 時間; 0 無 零 ゼロ なし",
        units={"km": "キロメートル|キロ", "m": "メートル", "cm": "センチメートル|センチ", "mm": "ミリメートル|ミリ", "kg": "キログラム", "g": "グラム",
               "tonne": "トン", "litre": "リットル", "hour": "時間|時", "minute": "分|分間", "second": "秒|秒間", "day": "日|日間", "week": "週|週間",
               "month": "か月|ヶ月|カ月|ヵ月|箇月|月", "year": "年|年間|歳|才|周年|年代", "century": "世紀", "degree": "度|°", "mile": "マイル", "foot": "フィート",
               "inch": "インチ", "celsius": "℃|°c|摂氏", "hectare": "ヘクタール", "km2": "平方キロメートル|平方キロ", "m2": "平方メートル", "%": "%|％|パーセント",
               "lb": "ポンド"},
    ),
    Profile("ko", "latin", units={"year": "년|년간|살|세", "month": "월|개월", "day": "일|일간", "hour": "시간|시", "minute": "분", "%": "%|퍼센트|프로"}),
    *(Profile(code, "latin") for code in ("ar", "he", "fa", "ur", "hi", "bn", "ta", "te", "th", "ka", "am", "km", "lo", "my")),
)  # fmt: skip

_LUXEMBOURGISH = Profile("lb", "nouns")


def _profiles() -> dict[str, Profile]:
    return {profile.code: profile for profile in (*_TABLE, _LUXEMBOURGISH)}


_PROFILES = _profiles()


@lru_cache(maxsize=256)
def profile_of(code: str) -> Profile:
    """Return the profile of a language. A language without an entry has names by capitals, and digits."""
    return _PROFILES.get(code) or Profile(code)
