"""Requests that have nothing to do with any family: what a memory's gate should turn away.

General questions, small talk, sums and little writing tasks, each with a plain answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

from benchmarks.memory.families.family import NAMES, Request, chat, words
from kvtier.errors import UsageError

Row = dict[str, str]


@dataclass(frozen=True)
class Topic:
    """Ways to ask, one answer, and the rows of words that fill both."""

    questions: tuple[str, ...]
    answer: str
    rows: tuple[Row, ...]


def pairs(first: str, second: str, text: str) -> tuple[Row, ...]:
    """Rows from `a:b c:d …`; a low line stands for a space."""
    split = (pair.replace("_", " ").split(":") for pair in words(text))
    return tuple({first: one, second: other} for one, other in split)


def singles(name: str, text: str) -> tuple[Row, ...]:
    return tuple({name: word.replace("_", " ")} for word in words(text))


ANIMALS = words("fox cat bear frog horse rabbit lion mouse goat swan whale tiger")
SUMS = tuple(
    {"a": str(a), "b": str(b), "sum": str(a + b), "product": str(a * b)}
    for a, b in product(range(2, 12), range(3, 13))
)
SPELT = tuple(
    {"word": word, "letters": "-".join(word), "capitals": word.upper()}
    for word in words("giraffe planet violin ocean pepper island wizard rocket monkey castle")
)
CAPITALS = pairs(
    "country",
    "capital",
    "France:Paris Italy:Rome Spain:Madrid Germany:Berlin Portugal:Lisbon Austria:Vienna "
    "Ireland:Dublin Greece:Athens Norway:Oslo Sweden:Stockholm Finland:Helsinki Poland:Warsaw "
    "Japan:Tokyo China:Beijing Egypt:Cairo Peru:Lima Chile:Santiago Cuba:Havana Kenya:Nairobi "
    "Hungary:Budapest",
)
OPPOSITES = pairs(
    "word",
    "opposite",
    "hot:cold fast:slow early:late happy:sad rich:poor young:old hard:soft wet:dry full:empty "
    "strong:weak loud:quiet wide:narrow deep:shallow true:false brave:afraid north:south",
)
PAST = pairs(
    "verb",
    "past",
    "go:went see:saw take:took eat:ate run:ran write:wrote sing:sang swim:swam fly:flew "
    "begin:began know:knew give:gave drink:drank fall:fell grow:grew speak:spoke",
)
YOUNG = pairs(
    "animal",
    "young",
    "dog:puppy cat:kitten cow:calf horse:foal sheep:lamb bear:cub duck:duckling goose:gosling "
    "goat:kid hen:chick deer:fawn frog:tadpole swan:cygnet kangaroo:joey",
)
AUTHORS = pairs(
    "book",
    "author",
    "Hamlet:William_Shakespeare Emma:Jane_Austen Dracula:Bram_Stoker Faust:Goethe "
    "Ulysses:James_Joyce Oliver_Twist:Charles_Dickens Don_Quixote:Cervantes "
    "War_and_Peace:Leo_Tolstoy Frankenstein:Mary_Shelley Moby_Dick:Herman_Melville",
)
COLOURS = pairs(
    "thing",
    "colour",
    "grass:green snow:white blood:red coal:black a_lemon:yellow the_sky:blue a_carrot:orange "
    "chocolate:brown a_banana:yellow a_ruby:red an_emerald:green milk:white",
)
EXAMPLES = pairs(
    "kind",
    "three",
    "fruits:apple,_pear_and_plum rivers:the_Nile,_the_Rhine_and_the_Amazon "
    "planets:Mars,_Venus_and_Saturn trees:oak,_birch_and_pine "
    "birds:robin,_eagle_and_sparrow metals:iron,_copper_and_zinc "
    "sports:tennis,_rugby_and_golf oceans:Pacific,_Atlantic_and_Indian "
    "insects:ant,_bee_and_beetle gases:oxygen,_nitrogen_and_helium "
    "composers:Bach,_Mozart_and_Verdi vegetables:carrot,_leek_and_cabbage",
)
SKILLS = singles(
    "skill",
    "paint dance swim draw juggle knit sing ski play_chess ride_a_horse write_poems speak_Latin",
)

TOPICS = (
    Topic(
        ("What is the capital of {country}?", "Which city is the capital of {country}?"),
        "The capital of {country} is {capital}.",
        CAPITALS,
    ),
    Topic(("What is {a} plus {b}?", "Add {a} and {b}."), "{a} plus {b} is {sum}.", SUMS),
    Topic(
        ("What is {a} times {b}?", "How much is {a} multiplied by {b}?"),
        "{a} times {b} is {product}.",
        SUMS,
    ),
    Topic(
        ("What is the opposite of {word}?", "Tell me the antonym of {word}."),
        "The opposite of {word} is {opposite}.",
        OPPOSITES,
    ),
    Topic(
        ("What is the past tense of {verb}?", "How does one put {verb} into the past tense?"),
        "The past tense of {verb} is {past}.",
        PAST,
    ),
    Topic(
        ("What is a young {animal} called?", "What do people call the baby of a {animal}?"),
        "A young {animal} is called a {young}.",
        YOUNG,
    ),
    Topic(("Who wrote {book}?", "Who is the author of {book}?"), "{author} wrote {book}.", AUTHORS),
    Topic(("What colour is {thing}?",), "The colour of {thing} is {colour}.", COLOURS),
    Topic(
        ("Name three {kind}.", "Can you give me three examples of {kind}?"),
        "Three {kind} are {three}.",
        EXAMPLES,
    ),
    Topic(
        ("How can I learn to {skill}?", "Give me one piece of advice, I want to {skill}."),
        "To {skill} well, find a good teacher and practise a little every day.",
        SKILLS,
    ),
    Topic(
        ("Hi, I am {name}. How are you today?", "Good morning! My friends call me {name}."),
        "Hello {name}, I am doing well, thank you! What would you like to talk about?",
        tuple({"name": name} for name in NAMES),
    ),
    Topic(
        ("Write a birthday wish for my friend {name}.",),
        "Happy birthday, {name}! I wish you a year full of joy and good health.",
        tuple({"name": name} for name in NAMES),
    ),
    Topic(
        ("Tell me a very short story of a {one} and a {other}.",),
        "Once upon a time a {one} met a {other} by the river, and they became friends.",
        tuple({"one": a, "other": b} for a, b in product(ANIMALS, ANIMALS) if a != b),
    ),
    Topic(("How do you spell {word}?",), "{word} is spelt {letters}.", SPELT),
    Topic(("Write {word} in capital letters.",), "{capitals}", SPELT),
)


def off_topic_requests(seed: int, count: int) -> tuple[Request, ...]:
    """`count` requests with distinct prompts, of all topics in turn as long as each has some left.
    Raises UsageError where there are not as many."""
    most = sum(len(topic.rows) for topic in TOPICS)
    if not 0 <= count <= most:
        raise UsageError("count", f"0 … {most}", count)
    rng = random.Random(f"off topic {seed}")
    left = [(topic, rng.sample(topic.rows, len(topic.rows))) for topic in TOPICS]
    found: list[Request] = []
    while len(found) < count:
        left = [(topic, rows) for topic, rows in left if rows]
        for topic, rows in left:
            row, question = rows.pop(), rng.choice(topic.questions)
            found.append(chat(question.format(**row), topic.answer.format(**row), question))
    return tuple(found[:count])
