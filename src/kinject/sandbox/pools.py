"""The names and values of Tarvenia, the sandbox's fictional country. All are invented."""

from __future__ import annotations

from typing import Final

DEMONYM: Final = "Tarvenian"

FEMALE_NAMES: Final = (
    "Alenis", "Breva", "Caelia", "Dorwen", "Elsine", "Farny", "Grethe", "Hildara", "Ilvane", "Jathia", "Kimra",
    "Linte", "Maerin", "Nimette", "Orsola", "Paesta", "Quilla", "Reska", "Seline", "Thirna", "Ulvara", "Vemba",
    "Wenna", "Yselle",
)  # fmt: skip
MALE_NAMES: Final = (
    "Aldrik", "Boskel", "Cildan", "Dorvas", "Emrin", "Fumas", "Gronden", "Heldo", "Istvar", "Jorven", "Kusken",
    "Lorno", "Moldan", "Nostin", "Oren", "Peivel", "Ruvik", "Stellan", "Tromen", "Ulmar", "Vaeldo", "Wallus",
    "Yorick", "Zandor",
)  # fmt: skip
LAST_NAMES: Final = (
    "Arndale", "Askoy", "Baervin", "Barrick", "Bentaster", "Biskole", "Bodrane", "Brandow", "Breskis", "Brodant",
    "Calloy", "Carnuin", "Cenaster", "Cinow", "Corvath", "Cuskis", "Daldeth", "Darroy", "Delkane", "Dolander",
    "Dothane", "Drenard", "Drilking", "Dustane", "Eckmar", "Eldroy", "Embrick", "Estow", "Faskur", "Fendoy",
    "Feinole", "Forving", "Frelander", "Gadrick", "Garoy", "Geldow", "Gentur", "Girnow", "Grastove", "Grolden",
    "Gustane", "Hadrow", "Haskin", "Hemlard", "Hodander", "Huldant", "Hurvow", "Ibsane", "Ilkoy", "Imbrell",
    "Isardan", "Jandow", "Jarrey", "Jinis", "Jonderal", "Joskoy", "Jundeth", "Kandrell", "Karvick", "Kethis",
    "Kinole", "Kleston", "Korvane", "Kurvey", "Ladaster", "Laskov", "Lanell", "Lirning", "Londuin", "Lothoy",
    "Luntar", "Mallur", "Mantard", "Marrow", "Merring", "Mestove", "Morvole", "Murvane", "Nandard", "Narvis",
    "Neskur", "Nethran", "Norruin", "Nurrust", "Oberan", "Oldrey", "Ombrick", "Orvoy", "Pamick", "Pedrust",
    "Penethal", "Pinnow", "Podell", "Povander", "Quarrell", "Questane", "Ralstow", "Rasoy", "Reinder", "Rintane",
    "Rolaster", "Rovick", "Rullow", "Samboy", "Seskane", "Silrow", "Skarn", "Skelder", "Sorrath", "Staldus",
    "Stivant", "Surrane", "Sustard", "Tarrant", "Tendis", "Thalow", "Tholleth", "Tivane", "Tomric", "Travey",
    "Tulding", "Umbrick", "Ungar", "Urstow", "Valdis", "Veinoy", "Velder", "Vorvane", "Vundard", "Waldur", "Warvey",
    "Welkane", "Wendow", "Withoy", "Wolkant", "Wurvell", "Yandrick", "Yestow", "Zaskin", "Zavant", "Zerreth",
    "Zillur",
)  # fmt: skip

TOWNS: Final = (
    "Aldermouth", "Brackwater", "Coldharrow", "Dunmere", "Eastrigg", "Fernlow", "Glasshaven", "Hollin", "Inverloch",
    "Juniper", "Kettleby", "Larkstead", "Mossgate", "Netherby", "Oakmarsh", "Pellmere", "Quernford", "Ravensey",
    "Saltmarsh", "Thornwick", "Ullersby", "Vinehill", "Westering", "Yarrowdale",
)  # fmt: skip
SCHOOLS: Final = (
    "Ambrose College", "Bellweather Academy", "Candlewick Institute", "Dovecote School", "Eastgate Polytechnic",
    "Foundry Lane School", "Greystone College", "Highfield Academy", "Ironbridge Institute", "Jasper Hall",
    "Kingsway Polytechnic", "Lanternhouse School", "Meridian College", "Northcliff Academy", "Orchard Institute",
    "Pilgrim Hall", "Quayside Polytechnic", "Rosewater School", "Silverbirch College", "Tollgate Academy",
    "Upperwood Institute", "Violet Hall", "Windmill Polytechnic", "Yewtree School",
)  # fmt: skip
FIRMS: Final = (
    "Anvilor Works", "Borealis Shipping", "Cobaltine Press", "Driftwood Bank", "Emberline Railways", "Falconer Mills",
    "Gossamer Textiles", "Hearthstone Mutual", "Indigo Foundries", "Jackdaw Press", "Keystone Quarries",
    "Lodestar Shipping", "Marigold Mills", "Nightjar Railways", "Obsidian Works", "Pinnacle Textiles",
    "Quicksilver Mutual", "Redwing Bank", "Sundial Foundries", "Tamarack Quarries", "Umberland Mills",
    "Vermilion Works", "Wayfarer Shipping", "Zephyrine Press",
)  # fmt: skip
FIELDS: Final = (
    "amber chemistry", "bridge design", "cloud botany", "dialect mapping", "echo surveying", "frost agronomy",
    "glacier acoustics", "harbour law", "ink restoration", "jetty engineering", "kelp genetics", "lens grinding",
    "moss ecology", "night astronomy", "orchid medicine", "paper statistics", "quarry geology", "river archaeology",
    "salt economics", "tide forecasting", "urban falconry", "volcano optics", "weather history", "yarn mechanics",
)  # fmt: skip
BIRTH_YEARS: Final = tuple(str(year) for year in range(1931, 1961))

POOLS: Final[dict[str, tuple[str, ...]]] = {
    "birth_year": BIRTH_YEARS, "home_town": TOWNS, "school": SCHOOLS, "employer": FIRMS, "field": FIELDS,
}  # fmt: skip
ATTRIBUTES: Final = tuple(POOLS)
