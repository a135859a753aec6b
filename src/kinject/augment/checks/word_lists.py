"""Word lists by which names are recognized: of English first, then of German and Chinese."""

from __future__ import annotations

import re

_STARTERS_TEXT = """
a about above according across additionally after afterwards again against alas albeit all almost along alongside
already also although altogether always amid amidst among amongst an and another any anyone are around as aside at
away back based because become before began behind being below beneath beside besides between beyond both but by can
certain clearly come consequently considered critics currently data de despite did do does down due during each
earlier early eight either elsewhere en enough especially even eventually ever every everyone everything evidently
except experts fans far few fewer finally first five following for former formerly fortunately founded four friday
from further furthermore given had has have he hence her here hers high his historically hosted how however i if in
indeed initially inside instead into is it its itself just known last late later latter least led less like likewise
little local located long made many may maybe meanwhile members men mere might modern monday more moreover most much
must my named near nearby nearly neither never nevertheless new next nine no nobody none nonetheless nor not notable
notably nothing now of off often old on once one only onto open or originally other others otherwise our out outside
over overall part particularly people perhaps plus post prior quite rather recent regardless researchers same saturday
scientists second seen set seven several shall she should similarly since six so some someone something sometimes soon
still students subsequently such sunday supposedly surely take taken ten than that the their theirs them themselves
then there thereafter thereby therefore these they third this those though three through throughout thursday thus to
today together too toward towards tuesday twenty two under unfortunately unless unlike until up upon us usually
various very via was we wednesday well were what whatever when whenever where whereas wherever whether which while who
whoever whole whom whose why will with within without women would yesterday yet you your
yours ours mine hers theirs myself itself himself herself themselves ourselves yourself yourselves
"""
_GENERIC_TEXT = """
academy administration agency airport army assembly association award bank battle bay board book building bureau
capital captain castle cathedral center central centre century chair chairman chamber championship chancellor chapter
chief church city club coast college colonel commander commission committee community company conference congress
constitution convention corporation council count county coup court cup day defence defense department development
director district division doctor dome duke dynasty east eastern eastside economy emperor empire era event executive
expo fair federal federation festival field final finals first force forces forest fort foundation fund galaxy games
general global gold government governor grand great group gulf hall head headquarters high hill hills hospital hotel
house hurricane inc independent institute international island islands judge justice king kingdom lake law league
level lieutenant lord lower magazine main major march marquis mayor medal media memorial meteorological minister
ministry minor miss mission monument mount mountain mountains movement mr mrs ms museum nation national new north
northeast northern northside northwest ocean office officer official old olympic opera operation order organisation
organization pact palace park parliament party peace peninsula people people's plan planet police pope port premier
president president's presidential press prime prince princess professor program project protocol province public
queen radio rail railway region regional republic research reserve revolution river road royal saint school science
sea secretary senate senator series service show showdown shrine sir sister society solar south southeast southern
southside southwest square st stadium star state states station storm street summer summit supreme system team
television temple territory theater theatre tournament tower town trade treaty tribunal tropical tsunami typhoon union
united university upper valley village war water west western westside winter world zone
"""
_FOLLOWERS_TEXT = """
and became began can could did died does founded had has held is joined led left lived made moved played received said
served took was will won worked works would wrote
"""
_COMMON_ENDINGS_TEXT = """
able ance ed ence er ers ful hood ible ic ical ies ing ings ism ist ists ities ity ive less ly man men ment ments ness
or ors ous ship sion sions tion tions ual ures wards wise
"""
_DERIVED_ENDINGS_TEXT = """
's ais an ans ch ean eans egian ene enes er ers es ese i ian ians ic ine ines inian ish ite ites n nian nians ns ois s
tic uese vian
"""
_SYNONYMS_TEXT = """
us usa america american americans united states
uk britain british united kingdom
mars martian martians
france french
spain spanish spaniards
netherlands dutch holland
wales welsh
denmark danish danes
turkey turkish turks
poland polish poles
greece greek greeks
finland finnish finns
switzerland swiss
england english
anglo british britain uk english england
ireland irish
scotland scottish scots
normandy norman normans
europe european europeans eu
earth earthly terrestrial extraterrestrial interplanetary interstellar intergalactic planet world globe
asia asian asians asiatic
germany german germans
china chinese
burma myanmar
catholicism catholic
christ christian christianity christmas
tv television
hq hqs headquarters headquartered headquarter
wwi ww1 world war one i first
wwii ww2 world war two ii second
un united nations
roman rome romans
"""

SENTENCE_STARTERS = frozenset(_STARTERS_TEXT.split())
"""Stop words and other words that begin sentences and are not names."""

GENERIC_WORDS = frozenset(_GENERIC_TEXT.split())
"""Words in names that denote a kind of thing (museum, river, president): a rewriting may replace them."""

NAME_FOLLOWERS = frozenset(_FOLLOWERS_TEXT.split())
"""Words that follow a name at the beginning of a sentence."""

COMMON_ENDINGS = tuple(_COMMON_ENDINGS_TEXT.split())
"""Endings of words that begin sentences and are not names."""

DERIVED_ENDINGS = frozenset(_DERIVED_ENDINGS_TEXT.split())
"""Endings of words derived from names: Haiti, Haitian."""

BASE_ENDINGS = frozenset(("", "a", "ia", "e", "o", "y", "en", "land", "s", "us", "os", "ay", "al", "ium", "is", "ce"))
"""Endings of names that a derived ending replaces: Canada, Canadian."""


def _group_synonyms() -> dict[str, frozenset[str]]:
    synonyms: dict[str, frozenset[str]] = {}
    for line in _SYNONYMS_TEXT.strip().splitlines():
        words = frozenset(line.split())
        for word in words:
            synonyms[word] = synonyms.get(word, frozenset()) | words
    return synonyms


SYNONYMS = _group_synonyms()
"""Word -> words with the same meaning."""

BEFORE_PLACES = frozenset(("of", "in", "to", "from", "at", "by", "for", "with", "near"))
_GERMAN_ARTICLES_TEXT = """
der die das den dem des ein eine einen einem einer eines kein keine keinen jeder jede jedes dieser diese dieses sein seine ihr
ihre ihren im am zum zur vom beim ans ins mit als ist wie oder nur auch
"""
GERMAN_ARTICLES = frozenset(_GERMAN_ARTICLES_TEXT.split())
GERMAN_NAME_ENDINGS = (
    "burg", "berg", "bach", "heim", "dorf", "hausen", "feld", "stein", "mann", "furt", "ingen", "haven", "stedt", "stadt",
    "kirchen", "wald", "walde", "bein", "thal", "brunn", "rode", "leben",
)  # fmt: skip
"""Endings of surnames and of names of places that are German words, too."""
GERMAN_ENDINGS = ("ern", "es", "en", "er", "e", "n", "s", "")
GERMAN_LINKS = ("es", "s", "en", "n", "er", "e", "")
GERMAN_NOUN_ENDINGS = (
    "ung", "heit", "keit", "schaft", "tät", "tion", "sion", "ismus", "ment", "nis", "tum", "chen", "lein", "ling", "anz", "enz",
    "ierung", "erei", "nisse", "isten", "ist", "logie", "graf", "graph", "meter", "zeug", "werk", "haus", "weise",
)  # fmt: skip
TRANSLITERATED = re.compile(
    "[阿埃艾爱安奥澳巴白班邦保鲍北贝本比彼边别宾波伯博勃布查茨达戴丹道德登邓迪蒂丁东杜顿多恩尔法凡范菲费芬丰弗福盖甘冈高戈格葛根古瓜圭哈海汉"
    "豪赫亨胡华怀霍基吉加佳迦杰金卡凯坎康考科柯可克肯孔库夸奎昆拉莱赖兰朗劳勒雷里利莉立连廉列林琳龙隆卢鲁路伦罗洛马玛迈麦曼梅门蒙米密明缪莫默"
    "墨姆穆内纳娜南尼妮宁纽努诺欧帕潘庞培佩彭皮匹平珀普奇齐契恰乔切琼丘热日荣茹瑞若萨塞赛桑瑟森沙莎山尚绍舍申圣施史士舒斯丝司思松苏索塔泰坦汤"
    "特滕提廷通图托瓦万旺威韦维魏温文翁沃乌吾武伍希西锡席夏肖歇谢辛欣休雅亚延扬耶叶伊因英尤于约泽扎詹珍芝治朱卓兹佐]{3,}"
)
