"""Words that tasks are made of: names, places, things, and made-up names and codes.

Plain constants and small drawing functions; half of all names are made up from syllables, so that
answers have to be read from the prompt. Used by `families`.
"""

from __future__ import annotations

import random


def listing(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


FIRST_NAMES = listing(
    """Ada Adam Agnes Alan Alba Alice Amir Amy Ana Andre Anna Anton Ari Arthur Astrid Aya Ben Bella
    Bianca Boris Bruno Carl Carla Carmen Cecil Chen Clara Dan Daria David Dina Diego Dora Edgar
    Edith Elena Eli Ella Emil Emma Erik Esther Eva Farid Felix Finn Flora Frank Freya Gina Grace
    Greta Hana Hans Hanna Hugo Ida Igor Ines Ingrid Iris Isaac Ivan Jack Jana Jane Jin Joan Jonas
    Jose Judith Julia Kai Karin Karl Kate Kenji Kira Klara Lars Laura Lea Lena Leo Lia Lily Lina
    Lisa Liu Luca Lucy Luis Maja Marc Maria Marta Max Maya Mei Mia Mila Mina Mira Mona Nadia Nina
    Noah Nora Olga Olivia Omar Oscar Otto Pablo Paul Petra Pia Quinn Ravi Rita Robin Rosa Ruth Sam
    Sara Selma Sofia Stella Sven Tara Theo Tim Tina Tom Uma Vera Victor Wanda Yara Yuki Zoe"""
)
LAST_NAMES = listing(
    """Abel Adler Baker Bauer Becker Berg Blake Brandt Brook Brown Carter Castro Chan Clark Cole
    Cruz Dahl Diaz Dixon Dunn Ellis Evans Falk Fischer Ford Fox Garcia Grant Gray Green Haas Hale
    Hall Hansen Hill Holm Hunt Jensen Jones Kaya Keller Kent Khan Kim King Klein Koch Lane Larsen
    Lee Lind Lopez Lund Marsh Mason Meyer Mills Moore Moss Nash Novak Olsen Park Perez Pope Price
    Quist Reed Rossi Roth Ruiz Sato Shaw Silva Smith Stone Sun Tanaka Vale Vega Wagner Walker Wang
    Ward Weber West Wolf Wood Young Zhang"""
)
CAPITALS = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Brazil": "Brasilia",
    "Bulgaria": "Sofia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Colombia": "Bogota",
    "Croatia": "Zagreb",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "Estonia": "Tallinn",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Ghana": "Accra",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Iceland": "Reykjavik",
    "India": "New Delhi",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Latvia": "Riga",
    "Lithuania": "Vilnius",
    "Malta": "Valletta",
    "Mexico": "Mexico City",
    "Morocco": "Rabat",
    "Nepal": "Kathmandu",
    "Norway": "Oslo",
    "Pakistan": "Islamabad",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Qatar": "Doha",
    "Romania": "Bucharest",
    "Russia": "Moscow",
    "Senegal": "Dakar",
    "Serbia": "Belgrade",
    "Slovakia": "Bratislava",
    "Slovenia": "Ljubljana",
    "South Korea": "Seoul",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Switzerland": "Bern",
    "Syria": "Damascus",
    "Thailand": "Bangkok",
    "Tunisia": "Tunis",
    "Turkey": "Ankara",
    "Uganda": "Kampala",
    "Ukraine": "Kyiv",
    "Uruguay": "Montevideo",
    "Vietnam": "Hanoi",
    "Zambia": "Lusaka",
}
CITIES = (
    *CAPITALS.values(),
    *listing(
        """Amsterdam Antwerp Barcelona Basel Bergen Boston Bremen Chicago Cologne Dallas Denver
    Dresden
    Florence Geneva Genoa Glasgow Hamburg Houston Istanbul Kyoto Leeds Leipzig Lyon Malaga Malmo
    Manchester Marseille Miami Milan Munich Naples Nice Osaka Porto Portland Seattle Seville Sydney
    Toronto Turin Valencia Venice York Zurich"""
    ),
)
COUNTRIES = tuple(CAPITALS)
COLOURS = listing("red blue green yellow black white orange purple brown pink grey silver gold")
ANIMALS = listing(
    """ant bear bee camel cat cow crab crow deer dog donkey duck eagle elephant fish fly fox frog
    goat goose hare hen horse lion lizard mole monkey moose mouse otter owl panda parrot pig pigeon
    rabbit rat raven seal shark sheep snail snake spider swan tiger turtle whale wolf worm
    zebra"""
)
FOODS = listing(
    """apple apricot banana bean beer beet berry bread butter cabbage cake carrot cheese cherry
    coffee corn cream date egg fig flour garlic grape honey jam juice kale leek lemon lime mango
    melon milk mint mushroom noodle nut oil olive onion pasta peach pear pepper plum potato radish
    rice salad salt soup spinach sugar tea tomato walnut water yogurt"""
)
THINGS = listing(
    """anchor arrow bag ball basket bell belt bench bike boat book boot bottle bowl box bridge broom
    brush bucket button candle car card chain chair clock coat coin cup desk dice door drum fan
    fence flag flute fork gate glass glove guitar hammer hat hook jar kettle key kite knife ladder
    lamp letter lock map mask mirror nail needle oven paint paper pen pencil phone piano pillow pin
    pipe plate pot radio ring rope ruler saw scarf ship shirt shoe shovel sock sofa spoon stamp
    stone stove string sword table tent ticket towel toy train tray truck umbrella vase wallet watch
    wheel whistle window wire"""
)
ADJECTIVES = listing(
    """big bright broken calm cheap clean cold cosy dark deep dry dusty early empty fast flat fresh
    full heavy high hot huge late light little long loud low narrow neat new noisy old plain quick
    quiet rough round sharp short simple slow small smooth soft strange strong sweet tall thick thin
    tiny warm weak wet wide wild young"""
)
PLACES = listing(
    """airport attic bakery bank barn beach cafe castle cellar church cinema clinic factory farm
    field forest garage garden gym hall harbour hill hotel house island kitchen lake library market
    mill museum office park pier port river road school shop square stable station street studio
    temple theatre tower tunnel valley village warehouse yard zoo"""
)
JOBS = listing(
    """actor artist baker barber builder butcher chef clerk dancer dentist doctor driver editor
    engineer farmer fisher gardener guard judge lawyer miner nurse painter pilot plumber poet
    printer sailor singer tailor teacher waiter writer"""
)
VERBS_PAST = listing(
    """bought carried cleaned closed counted dropped found forgot hid kept left lost moved noticed
    opened packed painted passed repaired sold saw sent stored threw took used washed wrapped"""
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = listing(
    """January February March April May June July August September October November
    December"""
)
NOUNS = (*ANIMALS, *FOODS, *THINGS)

_STARTS = listing("b bl br c ch d dr f g gr h j k kl l m n p pr qu r s sh st t tr v w y z")
_VOWELS = listing("a e i o u a e i o ai ea io ou")
_ENDS = ("", "", "", "l", "m", "n", "r", "s", "t", "k", "nd", "rn", "x")
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def made_up(rng: random.Random, syllables: int = 2) -> str:
    """A word that exists nowhere, lower case."""
    choice = rng.choice
    return "".join(
        choice(_STARTS) + choice(_VOWELS) + (choice(_ENDS) if last else "")
        for last in [False] * (syllables - 1) + [True]
    )


def first_name(rng: random.Random) -> str:
    """A first name, one in three made up."""
    return made_up(rng).capitalize() if rng.random() < 0.33 else rng.choice(FIRST_NAMES)


def full_name(rng: random.Random) -> str:
    """First and last name."""
    last = made_up(rng).capitalize() if rng.random() < 0.33 else rng.choice(LAST_NAMES)
    return f"{first_name(rng)} {last}"


def city(rng: random.Random) -> str:
    """A city, one in four made up."""
    return made_up(rng, 3).capitalize() if rng.random() < 0.25 else rng.choice(CITIES)


def code(rng: random.Random) -> str:
    """A short code of capitals and digits, such as KD-482 or 90317."""
    kind = rng.randrange(4)
    if kind == 0:
        return f"{rng.choice(_LETTERS)}{rng.choice(_LETTERS)}-{rng.randrange(100, 1000)}"
    if kind == 1:
        return f"{rng.choice(_LETTERS)}{rng.randrange(10, 100)}"
    return str(rng.randrange(1000, 100000))


def date(rng: random.Random) -> str:
    """An ISO date."""
    return f"{rng.randrange(2020, 2036)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"


def clock(rng: random.Random) -> str:
    """A time of day."""
    return f"{rng.randrange(24):02d}:{rng.choice((0, 15, 30, 45, rng.randrange(60))):02d}"


def email(rng: random.Random) -> str:
    """A mail address."""
    host = rng.choice(("mail", "post", "example", made_up(rng)))
    return f"{first_name(rng).lower()}@{host}.{rng.choice(('com', 'org', 'net'))}"


def phrase(rng: random.Random) -> str:
    """Two or three words: a title, a note, a search."""
    kind = rng.randrange(4)
    if kind == 0:
        return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    if kind == 1:
        return f"{rng.choice(NOUNS)} and {rng.choice(NOUNS)}"
    if kind == 2:
        return f"{rng.choice(ADJECTIVES)} {made_up(rng)}"
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} {rng.choice(PLACES)}"


def listed(words: list[str]) -> str:
    """`a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
