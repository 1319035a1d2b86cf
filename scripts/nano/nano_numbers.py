"""Drawn numbers and questions about them, for nano_vl.

A picture shows a number of one to five digits on paper of a light colour. Problems ask for it, for
the colour of one of its digits, and for the sum or the larger one of two pictures; some have no
picture and ask for a sum. A number of three or more digits is either in training pictures or in
held-out ones, which a hash of it decides; shorter ones are in both, drawn differently.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from nano_sums import is_held_out, sum_steps
from PIL import Image, ImageDraw, ImageFont

Size = tuple[int, int]
"""Height and width in pixels, multiples of 32."""
Shape = tuple[Size, ...]
"""The sizes of the pictures of one problem; a batch has problems of one shape."""
SINGLES: tuple[Shape, ...] = (
    ((32, 64),), ((32, 96),), ((32, 160),), ((64, 96),), ((64, 128),), ((64, 160),), ((96, 128),),
)  # fmt: skip
PAIRS: tuple[Shape, ...] = (
    ((32, 64), (32, 64)), ((32, 96), (32, 96)), ((64, 96), (64, 96)), ((32, 64), (64, 96)),
    ((64, 96), (32, 64)), ((64, 128), (32, 96)),
)  # fmt: skip
COLOURS = {
    "black": (20, 20, 20),
    "red": (205, 30, 30),
    "green": (20, 140, 40),
    "blue": (30, 60, 210),
    "orange": (240, 130, 10),
    "purple": (140, 40, 170),
}
PLACES = ("first", "second", "third", "fourth", "fifth")
SMALLEST_FONT = 20
MOST_DIGITS = 5
PICTURE = "\0"
"""Where a picture stands in the text of a problem."""


class Drawn(NamedTuple):
    """A picture: its digits with their colours, its size, and the seed of how it is drawn."""

    digits: str
    colours: tuple[str, ...]
    size: Size
    seed: str


class PictureProblem(NamedTuple):
    """A problem: its kind, the pictures in order, the user's message, the answer and its end."""

    kind: str
    pictures: tuple[Drawn, ...]
    text: str
    answer: str
    final: str

    @property
    def digits(self) -> int:
        """How many digits the longest number of a picture has."""
        return max((len(picture.digits) for picture in self.pictures), default=1)


def picture_problems(split: str, shape: Shape, seed: str) -> Iterator[PictureProblem]:
    """Yield problems of a shape, of `train` or `held_out`, without end.

    Held-out ones have their pictures before the text.
    """
    random = Random(f"{split} {shape} {seed}")
    make = (_sum_of_text, _about_one, _about_two)[len(shape)]
    while True:
        kind, pictures, question, working, final = make(random, split, shape)
        marks, behind = PICTURE * len(shape), random.random() < 0.3
        behind = behind and bool(shape) and split == "train"
        text = f"{question} {marks}" if behind else f"{marks}{question}"
        yield PictureProblem(kind, pictures, text, f"{working}Answer: {final}", final)


def draw(picture: Drawn) -> Image.Image:
    """Draw a picture; Pillow's own font is used in a random size and a random place."""
    random = Random(picture.seed)
    height, width = picture.size
    paper = tuple(random.randint(215, 255) for _ in range(3))
    image = Image.new("RGB", (width, height), paper)
    canvas = ImageDraw.Draw(image)
    for _ in range(random.randint(0, 3)):
        ends = [(random.randrange(width), random.randrange(height)) for _ in range(2)]
        canvas.line(ends, fill=tuple(channel - random.randint(15, 45) for channel in paper))
    largest = _largest_font(len(picture.digits), picture.size)
    size = random.randint(max(SMALLEST_FONT, round(0.7 * largest)), largest)
    step = size * random.uniform(0.56, 0.62)
    left = random.uniform(0, max(0.0, width - step * (len(picture.digits) + 0.2)))
    top = random.uniform(-0.15 * size, max(0.0, height - 1.05 * size))
    for place, (digit, colour) in enumerate(zip(picture.digits, picture.colours, strict=True)):
        tile = Image.new("L", (round(0.7 * size), round(1.2 * size)))
        ImageDraw.Draw(tile).text((0.06 * size, 0), digit, fill=255, font=_font(size))
        tile = tile.rotate(random.uniform(-8, 8), Image.Resampling.BILINEAR)
        ink = tuple(min(255, max(0, c + random.randint(-18, 18))) for c in COLOURS[colour])
        at = (round(left + place * step), round(top + random.uniform(-0.04, 0.04) * size))
        image.paste(ink, (*at, at[0] + tile.width, at[1] + tile.height), tile)
    return image


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return font


def _largest_font(digits: int, size: Size) -> int:
    return int(min(0.95 * size[0], size[1] / (0.62 * digits), 56))


Parts = tuple[str, tuple[Drawn, ...], str, str, str]
"""A problem's kind, pictures, question, working and result."""


def _about_one(random: Random, split: str, shape: Shape) -> Parts:
    picture = _picture(random, split, shape[0], MOST_DIGITS)
    if random.random() < 0.6:
        question = random.choice(("What number is this?", "Read the number.", "Which number?"))
        return "read", (picture,), question, "", picture.digits
    place = random.randrange(len(picture.digits))
    question = f"What colour is the {PLACES[place]} digit?"
    return "colour", (picture,), question, "", picture.colours[place]


def _about_two(random: Random, split: str, shape: Shape) -> Parts:
    first, second = (_picture(random, split, size, 3) for size in shape)
    a, b = int(first.digits), int(second.digits)
    if a != b and random.random() < 0.4:
        question = "Which number is larger, the first or the second?"
        return "larger", (first, second), question, f"{a} and {b}. ", PLACES[a < b]
    question = random.choice(("What is the sum of the numbers?", "Add the two numbers."))
    return "sum", (first, second), question, _working(a, b), str(a + b)


def _sum_of_text(random: Random, split: str, shape: Shape) -> Parts:
    a, b = (int(_number(random, split, random.randint(1, 3))) for _ in range(2))
    question = random.choice(("What is {}+{}?", "Calculate {}+{}.")).format(a, b)
    return "add", (), question, _working(a, b), str(a + b)


def _working(a: int, b: int) -> str:
    return f"{a}+{b}: {', '.join(sum_steps(a, b))}. "


def _picture(random: Random, split: str, size: Size, most: int) -> Drawn:
    fitting = [n for n in range(1, most + 1) if _largest_font(n, size) >= SMALLEST_FONT + 2]
    digits = _number(random, split, random.choice(fitting))
    one, many = random.choice([*COLOURS]), random.random() < 0.7
    colours = tuple(random.choice([*COLOURS]) if many else one for _ in digits)
    return Drawn(digits, colours, size, str(random.getrandbits(64)))


def _number(random: Random, split: str, digits: int) -> str:
    """Draw a number; some of three or more digits are held out."""
    while True:
        number = str(random.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1))
        if digits < 3 or is_held_out(f"picture {number}") == (split == "held_out"):
            return number
