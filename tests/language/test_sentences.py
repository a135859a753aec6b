"""Where sentences end, in the languages that docs/augmentation.md names and their neighbours."""

from __future__ import annotations

import pytest

from kinject.language.sentences import sentence_ends, sentences

# " | " stands where one sentence ends and the next begins, behind a space of its own.
TEXTS = {
    "English": [
        "See Fig. 3 and Figs. A and B. | They show more.",
        "Under Art. 12 it is void. | Modern art. | A painter said so.",
        "Take bus No. 7 today. | No. | That one is late.",
        "Ask Dr. Lin, Mr. He or Prof. The. | They know.",
        "Some metals, e.g. The Hague's tin, i.e. Sn, melt. | Others do not.",
        "He lives in the U.S. and works for Acme Inc. in Maine. | He is Swiss.",
        "We ship to the U.S. | The rest waits.",
        "Tea, coffee, etc. | We serve both.",
        "It opens at 9 a.m. | Bring a coat.",
        "J. R. R. Tolkien wrote it. | C. S. Lewis read it.",
        "The rope is 12 m. | The pole is 9 ft. long.",
        "It was 1994. | May came late.",
        "I am 30. | Berlin is older.",
        "1. Open the box. |\n2. Take the key. | It is brass.",
        "## 4.2. Results\n\nAll passed.",
        "3.  Two spaces. |\n> 4. A quotation.\n\n5.\n\nA number alone.",
        "Is it 3.5 or 4.0? | Yes! | (See vol. 2, pp. 11-14.) | Done.",
        'He said "Go." | She went.',
        "Dec. 9 was cold. | We met again in Feb. | The ice had gone.",
    ],
    "German": [
        "Nach Art. 5 Abs. 2 S. 1 gilt das. | Die Kunst jeder Art. | Sie lebt.",
        "Die Nr. 14 fehlt. | Siehe Abb. 3 und Tab. II dazu.",
        "Viele Tiere, z. B. Die Katze, schlafen. | Andere nicht.",
        "Das ist neu, d. h. Karl irrt. | Er weiß es.",
        "Sie kam am 3. Mai an. | Er ging am 12. Der Zug fuhr ab.".replace("12. Der", "12. | Der"),
        "Im 19. Jahrhundert wuchs sie. | Der 2. Weltkrieg kam.",
        "3. Oktober 1990: ein Feiertag. | Alle ruhten.",
        "Es kostet 3 Mio. Euro. | Es waren 5 Mio. | Die Stadt zahlt.",
        "Äpfel, Birnen usw. | Wir haben alles.",
        "Hr. Dr. Otto, geb. Meier, wohnt in der Gartenstr. 5 dort. | Sie auch.".replace(
            "Gartenstr. 5 dort", "Gasse 5"
        ),
        "Um 50 v. Chr. Geburt war Krieg. | Um 1200 n. Chr. | Die Burg stand.",
        "Das gilt i. d. R. Montags, o.ä. Tagen. | Sonst nicht.",
        "„Komm.“ | Er kam.",
        "Er fuhr 30 km. | Dann hielt er.",
    ],
    "French": [
        "M. Petit et Mme. Roux, art. 7, p. 12, l'ont vu. | Ils rient.",
        "L'art. | Les peintres l'aiment.",
        "Est-ce là ? | Oui ! | Il y est. | Nous aussi.",
    ],
    "Spanish": [
        "El Sr. Ruiz y la Dra. Paz viven en la Avda. Real, núm. 8, pág. 3. | ¿Y tú?",
        "En EE.UU. Nadie lo vio, p. ej. Juan. | Este sí.",
    ],
    "Italian": ["Il Sig. Neri, cfr. Dante, pag. 9, arriva. | Mele, pere ecc. | Il resto manca."],
    "Portuguese": ["O Sr. Reis, a Sra. Luz e o Eng. Dias, fig. 6, chegaram. | Tudo bem."],
    "Dutch": ["Dhr. Bos en drs. Kok, bijv. Jan, zie blz. 4, nr. 9. | Het is laat."],
    "Russian": [
        "А. С. Пушкин жил на ул. Мойка, см. Рис. 3. | Он умер в 1837 г. | Это было зимой.",
        "Проф. Орлов, т. е. Иван, купил хлеб и т. д. | Они пришли.",
    ],
    "Hindi": [
        "नदी गहरी है। | वह दूर है॥ | क्या तुम आए? | हाँ!",
        "डॉ. सिंह आए।वे गए।".replace("।वे", "।|वे"),
        "उसने कहा, “चलो।” | सब चले। | मूल्य रु. 500 है।",
    ],
    "Bengali": ["নদী গভীর। | সে দূরে থাকে।"],
    "Urdu": [
        "دریا گہرا ہے۔ | وہ دور ہے۔ | کیا تم آئے؟ | ہاں!",
        "۱۔ پہلا باب ہے۔ | دوسرا نہیں۔",
        "قیمت ۳۔۵ ہے۔ | اس نے کہا ”چلو۔“ | سب گئے۔",
    ],
    "Persian": ["رود عمیق است. | آیا آمدی؟ | بله."],
    "Arabic": [
        "النهر عميق، وهو بعيد؛ لكنه قريب. | هل جئت؟ | نعم!",
        "جاء د. سالم أمس. | أين هو؟\u200f | لا أدري.",
        "قال: «أين الكتاب؟» | ثم خرج",
    ],
    "Hebrew": ["הנהר עמוק. | האם באת? | כן."],
    "Chinese": ["河很深。|他很远！|“你来吗？”|来。"],
    "Japanese": ["川は深い。|「行こう。」|はい。"],
    "Korean": ["강은 깊다. | 너는 왔니? | 응."],
    "Armenian": ["Գետը խորն է։ | Նա հեռու է։"],
    "Amharic": ["ወንዙ ጥልቅ ነው። | እሱ ሩቅ ነው።"],
    "Thai": ["แม่น้ำลึก เขาอยู่ไกล"],
}
CASES = [(language, marked) for language, texts in TEXTS.items() for marked in texts]


@pytest.mark.parametrize(("language", "marked"), CASES)
def test_sentences_end_where_a_reader_ends_them(language: str, marked: str) -> None:
    expected = [part.strip() for line in marked.split("\n\n") for part in line.split("|")]
    text = marked.replace(" |", "").replace("|", "")
    assert sentences(text) == expected


@pytest.mark.parametrize(("language", "marked"), CASES)
def test_the_ends_are_positions_of_the_text_and_none_moves_with_what_follows(
    language: str, marked: str
) -> None:
    text = f"  {marked.replace(' |', '').replace('|', '')}\n"
    ends = sentence_ends(text)
    assert [text[end - 1].isspace() for end in ends] == [False] * len(ends)
    longer = sentence_ends(f"{text.rstrip()}\n\nMore of it. And more.")
    assert longer[: len(ends)] == ends
