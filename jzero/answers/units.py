"""The words after a number: units, counted things, and words that change the number.

A unit names the measured or counted thing, and does not change the number: 5 cm, 18 eggs. "5
million" is another number than 5, and "5 maybe" is no answer. Words in none of the lists below are
credited only if the question or the gold has them (`verdict`).
"""

from fractions import Fraction

from jzero.answers.quantities import LETTERS_OF_UNITS, UNIT_NAMES, named_unit
from jzero.answers.vocabulary import words

# Letters that form one word, although other runs of letters are products of symbols.
UNIT_WORDS = (
    words("day cent unit degree dollar euro yen rupee percent pct")
    | LETTERS_OF_UNITS
    | UNIT_NAMES
    | words("feet inche metre litre centimetre kilometre kilo")
) - words("molar bar henry arc ton")

# "3 dozen" is 36, and "2 thirds" is 2/3.
MULTIPLIERS: dict[str, Fraction] = {
    "dozen": Fraction(12),
    "hundred": Fraction(100),
    "thousand": Fraction(1000),
    "million": Fraction(10**6),
    "billion": Fraction(10**9),
    "trillion": Fraction(10**12),
    "half": Fraction(1, 2),
    "third": Fraction(1, 3),
    "quarter": Fraction(1, 4),
    "fourth": Fraction(1, 4),
    "fifth": Fraction(1, 5),
    "sixth": Fraction(1, 6),
    "seventh": Fraction(1, 7),
    "eighth": Fraction(1, 8),
    "ninth": Fraction(1, 9),
    "tenth": Fraction(1, 10),
    "hundredth": Fraction(1, 100),
    "thousandth": Fraction(1, 1000),
    "millionth": Fraction(1, 10**6),
    "billionth": Fraction(1, 10**9),
}

# "3 squared" is 9, and "3 feet squared" are square feet.
POWERS = {"squared": 2, "cubed": 3}

_BELOW_TWENTY = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_TENS = "ten twenty thirty forty fifty sixty seventy eighty ninety"
NUMBER_WORDS = {word: number for number, word in enumerate(_BELOW_TWENTY.split())} | {
    word: 10 * tens for tens, word in enumerate(_TENS.split(), start=1)
}

# Words after a number that are not a unit: they mark hedging, a second answer, or arithmetic in
# words.
REFUSED_WORDS = words(
    """or and not if is it are was maybe perhaps but either neither otherwise both no wrong
    incorrect false answer then to than mod else possibly also unless when where
    plus minus add subtract multiplied divided by over out double twice triple thrice quadruple
    gross score power root factorial choose opposite inverse reciprocal infinity modulo base
    remainder exponent"""
) | frozenset(NUMBER_WORDS)

# Words that accompany a unit, and are not a unit by themselves.
_MODIFIERS = words(
    """a an the of in on for at with from all each every per total different distinct new old
    additional extra other such same possible whole full empty
    nautical fluid
    red blue green yellow white black orange pink purple brown gray grey gold silver
    big small large little long short tall high wide deep right left
    real complex positive negative prime even odd natural ordered unique consecutive
    male female adult baby free single equal"""
)

# Things that the word problems of GSM8K and MATH count, and further units of measure.
_NOUNS = words(
    """acre acorn adult angle animal ant app apple arrangement article arrow
    bag ball balloon banana band bar barrel basket basketball bat batch bead bean bear bed bee bill
    bird block boat bolt bone book bottle bouquet bowl box boy bracelet branch bread brick brownie
    brother bucket bug building bus bushel button
    cake calorie camper can candle candy card car carrot carton case cat celsius cent century
    centimeter chair chapter chicken child children chip chocolate choice circle class clip club
    coat coin color combination computer cookie copy corner couple cow crate crayon
    cube cup cupcake customer
    day decade decibel degree desk diagonal dice dime dinner dish diver divisor dog doll
    dollar donut door doughnut dress driver duck
    ear edge egg element elephant email employee envelope episode euro event exam
    face factor fahrenheit family fan farmer finger fish flight floor flower follower foot
    friend frog fruit function
    gallon game gift girl glass goal goat gram grape group guest guppy
    hamburger hat head hectare hole home horse hotdog hour house
    inch insect integer item
    jar jellybean job joule journey jump
    kelvin key kid kilogram kilometer kilowatt kind knot kmph kph
    lap leaf leave leg lemon lesson letter level line lion liter loaf log lollipop lunch
    machine man marble match meal member men menu meter microgram mile milligram milliliter
    millimeter minute mistake month more mouse movie mph muffin multiple mug
    nail necklace newton nickel night notebook note novel number nut
    onion orange orbit ounce outcome outfit
    pack package page painting pair pancake panel paper parent part party passenger path pattern
    patient pen pencil penny people percent permutation person pet phone photo picture pie piece
    pill pint pipe pizza place plane plant plate player plum point pole polygon pool post pot
    potato pound present price problem program puppy puzzle
    quart question
    rabbit radian rat ray rectangle ride ring road robot rock roll room root rose
    round row rpm rule
    sandwich seashell seat second section seed sentence serving session set sheep sheet
    shelf shell ship shirt shoe shot side sister situp skirt slice snack sock soda solution song
    space spoon stair stamp star state step sticker stick stone store straw strawberry
    string student sum sweet
    table tablespoon tail task teacher team teaspoon term test ticket tie tile time tin tire token
    ton tooth towel town toy train tray tree triangle trip truck tube turn turtle type
    unit
    value vegetable vertex vertice village visitor volt vote
    wall watermelon watt way week wheel widget window woman women word worker
    yard year yen
    am pm noon midnight
    remaining altogether overall hertz hz mg mm oz ml ft cm km kg lb hr sec min
    kmh cc squares
    artist bale banknote beaker beetle berry biscuit blueberry bull bunny
    carnation cherry cloud comic container cracker cricket daisy decoration dessert
    driveway earring engineer eraser eye female firework flyer fry gemstone gnome goldfish
    grandchild gumball hit instance jewel jellyfish kitten ladybug lamb legos load magazine male
    mango marshmallow matchstick meatball minnow mushroom object oyster pastry peach peanut pebble
    petal pillow plank portion portrait poster report sausage scarf scoop shark skip spoke
    beat handshake intersection molecule atom move photon region solution subset
    spot steak sunflower text tissue toad tomato touchdown tub tulip whisker
    c f j n v w"""
)

_IRREGULAR_PLURALS = {
    "people": "person",
    "children": "child",
    "men": "man",
    "women": "woman",
    "mice": "mouse",
    "geese": "goose",
    "teeth": "tooth",
    "halves": "half",
    "leaves": "leaf",
    "loaves": "loaf",
    "shelves": "shelf",
    "scarves": "scarf",
    "tomatoes": "tomato",
    "potatoes": "potato",
    "mangoes": "mango",
    "grandchildren": "grandchild",
    "knives": "knife",
    "wolves": "wolf",
    "vertices": "vertex",
    "dice": "die",
}


def singular(word: str) -> str:
    """Returns a noun in the singular, or at least one spelling for its plural and singular."""
    word = word.lower()
    if word == "squares":  # the figures; "square" in front of a unit is a power
        return word
    if word in _IRREGULAR_PLURALS:
        return _IRREGULAR_PLURALS[word]
    if word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    if word.endswith(("ies", "ie")) and len(word) > 4:  # cookies are spelled like berries
        return word.removesuffix("s").removesuffix("ie") + "y"
    if word.endswith("s") and not word.endswith("ss") and len(word) > 2:
        return word[:-1]
    return word


def unit_name(word: str) -> str:
    """Returns the name under which units are compared: "Feet" and "ft" are "foot"."""
    name = named_unit(word)
    if name or len(word) == 1:  # 5 G is not 5 g
        return name or word
    return named_unit(singular(word)) or singular(word)


_SHORT_WORDS = words("no it is in on of to or at by as an we he be do so up")


def folded(word: str) -> str:
    """Returns a word in lower case, unless its capitals may have a meaning.

    Capitals do in short words and inside of a word: AA and Aa are two genotypes, CO and Co two
    substances.
    """
    is_plain = word.islower() or word.isupper() or word.istitle()
    is_long = len(word) > 2 or word.lower() in _SHORT_WORDS
    return word.lower() if is_plain and is_long else word


_KNOWN_NOUNS = frozenset(map(unit_name, _NOUNS)) | UNIT_NAMES | {"celsius", "fahrenheit"}
_KNOWN_MODIFIERS = frozenset(map(unit_name, _MODIFIERS)) | _MODIFIERS


def is_unit(name: str, more_nouns: frozenset[str]) -> bool:
    """Returns whether the words of a unit's name describe a measured or counted thing.

    At least one word must be a noun, from the lists of this module or among `more_nouns`, which are
    in the singular. The other words may be modifiers of a noun.
    """
    names = [word for word in name.split() if not word.lstrip("-").isdigit()]
    nouns = [word for word in names if word in _KNOWN_NOUNS or word in more_nouns]
    modifiers = [word for word in names if word not in nouns]
    return bool(nouns) and all(word in _KNOWN_MODIFIERS for word in modifiers)
