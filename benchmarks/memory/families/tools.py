"""A manual of tools with made-up names; the answer to a request is a call, its arguments copied.

    Set a timer of 25 minutes for the rice.     timer.murlo(minutes=25, dish=rice)

What each tool is for is said in the system turn, and an example or two of its calls follow. Which
subject has which made-up name is dealt anew for each seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.memory.families.family import CITIES, DAYS, NAMES, Content, Task, Wordings, words

TOOL_NAMES = words(
    "murlo tavik brenzo saldu ferix gomba lurka nadvo pelmi quista rotun sivra tolpa umbri vexla "
    "wandu yorka zenpo hulmi dorva"
)
NUMBERS = tuple(str(number) for number in range(12, 60))
HOURS = tuple(f"{hour}:{minute}" for hour in range(6, 22) for minute in ("15", "30", "45"))
# So many tools have a second example.
TWICE = 10
# The values that an argument can have.
VALUES = {
    "name": NAMES,
    "city": CITIES,
    "from": CITIES[:10],
    "to": CITIES[10:],
    "day": DAYS,
    "hour": HOURS,
    "minutes": NUMBERS,
    "amount": NUMBERS,
    "count": NUMBERS,
    "percent": NUMBERS,
    "degrees": NUMBERS[:14],
    "number": tuple(str(number) for number in range(1101, 9900, 107)),
    "room": words("kitchen bedroom office garage bathroom hall cellar attic"),
    "dish": words("rice pasta soup bread cake eggs tea pizza beans fish"),
    "item": words("apples candles pens batteries eggs plates bulbs stamps"),
    "plant": words("roses tomatoes ferns herbs tulips lemons orchids grapes"),
    "music": words("jazz opera blues folk rock tango disco soul"),
    "topic": words("taxes insurance holiday school garden budget contract rent"),
    "word": words("bridge winter butter window forest doctor silver summer"),
    "language": words("French German Spanish Italian Polish Greek Dutch Danish"),
    "film": words("Casablanca Titanic Rocky Jaws Alien Psycho Gandhi Amadeus"),
}


@dataclass(frozen=True)
class Tool:
    """One tool: what the manual says of it, its arguments in order, and how it is asked for."""

    subject: str
    purpose: str
    arguments: tuple[str, ...]
    wordings: Wordings


def tool(subject: str, purpose: str, arguments: str, seen: Sequence[str], new: str) -> Tool:
    return Tool(subject, purpose, words(arguments), Wordings(tuple(seen), (new,)))


TOOLS = (
    tool(
        "timer",
        "starts a kitchen timer",
        "minutes dish",
        (
            "Set a timer of {minutes} minutes for the {dish}.",
            "Start a timer for the {dish}, {minutes} minutes.",
        ),
        "The {dish} must cook for {minutes} minutes, remind me then.",
    ),
    tool(
        "alarm",
        "sets an alarm",
        "hour day",
        ("I need an alarm at {hour} on {day}.", "Set an alarm for {day} at {hour}."),
        "I have to get up at {hour} on {day}.",
    ),
    tool(
        "weather",
        "tells the weather",
        "city day",
        ("What is the weather in {city} on {day}?", "Weather for {day} in {city}, please."),
        "Will it rain in {city} on {day}?",
    ),
    tool(
        "taxi",
        "orders a taxi",
        "city hour",
        ("Order a taxi in {city} at {hour}.", "I need a taxi at {hour} in {city}."),
        "Have a car with a driver ready for me in {city} at {hour}.",
    ),
    tool(
        "table",
        "books a table to eat",
        "count day",
        (
            "Book a table for {count} guests on {day}.",
            "A table on {day} for {count} guests, please.",
        ),
        "We want to eat out on {day}, {count} of us.",
    ),
    tool(
        "buy",
        "buys things for the house",
        "count item",
        ("Buy {count} {item}.", "Please buy {count} {item} for us."),
        "Put {count} {item} on the shopping list.",
    ),
    tool(
        "lamp",
        "dims a lamp",
        "room percent",
        (
            "Dim the lamp in the {room} to {percent} percent.",
            "Lamp in the {room}: {percent} percent.",
        ),
        "The {room} is too bright, {percent} percent of the light is enough.",
    ),
    tool(
        "heat",
        "sets the heating",
        "room degrees",
        (
            "Heat the {room} to {degrees} degrees.",
            "Set the heating in the {room} to {degrees} degrees.",
        ),
        "It should be {degrees} degrees warm in the {room}.",
    ),
    tool(
        "music",
        "plays music",
        "music room",
        ("Play some {music} in the {room}.", "Some {music} music in the {room}, please."),
        "I would like to hear {music} in the {room}.",
    ),
    tool(
        "pay",
        "sends money",
        "amount name",
        ("Please pay {amount} dollars to {name}.", "Pay {name} {amount} dollars."),
        "I owe {name} {amount} dollars, settle that.",
    ),
    tool(
        "translate",
        "translates a word",
        "word language",
        ("Translate {word} into {language}.", "Please translate {word}, into {language}."),
        "How do you say {word} when you speak {language}?",
    ),
    tool(
        "meeting",
        "plans a meeting",
        "name day",
        ("Plan a meeting with {name} on {day}.", "Meeting on {day} with {name}, please."),
        "I want to sit down with {name} on {day}.",
    ),
    tool(
        "train",
        "finds a train",
        "from to",
        ("Find a train from {from} to {to}.", "Which train goes from {from} to {to}?"),
        "I am in {from} and must get to {to} by rail.",
    ),
    tool(
        "call",
        "calls somebody",
        "name hour",
        ("Call {name} at {hour}.", "At {hour}, call {name}."),
        "I promised {name} to ring at {hour}.",
    ),
    tool(
        "parcel",
        "follows a parcel",
        "number",
        ("Where is parcel {number}?", "Track parcel {number}."),
        "I am still waiting for my parcel, it has the number {number}.",
    ),
    tool(
        "water",
        "waters plants",
        "plant minutes",
        (
            "Water the {plant} for {minutes} minutes.",
            "Give the {plant} water for {minutes} minutes.",
        ),
        "The {plant} are dry, sprinkle them for {minutes} minutes.",
    ),
    tool(
        "papers",
        "opens a file of papers",
        "topic name",
        ("Open the papers on {topic} from {name}.", "Show me the papers from {name} on {topic}."),
        "I must read what {name} wrote on {topic}.",
    ),
    tool(
        "cinema",
        "gets cinema tickets",
        "film day",
        ("Get cinema tickets for {film} on {day}.", "Cinema on {day}, two tickets for {film}."),
        "I want to watch {film} at the cinema on {day}.",
    ),
    tool(
        "bicycle",
        "rents a bicycle",
        "city minutes",
        (
            "Rent a bicycle in {city} for {minutes} minutes.",
            "A bicycle in {city}, {minutes} minutes.",
        ),
        "I would like to cycle through {city} for {minutes} minutes.",
    ),
    tool(
        "lock",
        "locks a door",
        "room hour",
        ("Lock the door of the {room} at {hour}.", "At {hour}, lock the {room}."),
        "Nobody may enter the {room} after {hour}.",
    ),
)


class Tools(Task):
    """A task that asks which tool to call, and with what."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        names = random.Random(f"tools {seed}").sample(TOOL_NAMES, len(TOOLS))
        self.tools = {
            f"{tool.subject}.{name}": tool for tool, name in zip(TOOLS, names, strict=True)
        }
        self.kinds = tuple(self.tools)

    def draw(self, kind: str, rng: random.Random) -> Content:
        arguments = self.tools[kind].arguments
        return Content(kind, tuple((name, rng.choice(VALUES[name])) for name in arguments))

    def wordings(self, kind: str) -> Wordings:
        return self.tools[kind].wordings

    def answer(self, content: Content) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in content.values)
        return f"{content.kind}({arguments})"

    def rules(self) -> str:
        lines = [
            f"{name}({', '.join(tool.arguments)}) {tool.purpose}."
            for name, tool in self.tools.items()
        ]
        return "\n".join(["Answer every request with a call of one of these tools.", *lines])

    def examples(self, rng: random.Random) -> Sequence[Content]:
        twice = rng.sample(self.kinds, TWICE)
        return [self.content(kind, rng) for kind in (*self.kinds, *twice)]
