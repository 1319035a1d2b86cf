"""Drawn numbers and questions about them, for nano_vl.

A picture shows a number of one to five digits on paper of a light colour. Problems ask for it, for
the colour of one of its digits, and for the sum or the larger one of two pictures; some have no
picture and ask for a sum. A number of three or more digits is either in training pictures or in
held-out ones, which a hash of it decides; shorter ones are in both, drawn differently.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from nano_problems import Split, is_held_out, sum_steps
from PIL import Image, ImageDraw, ImageFont

Size = tuple[int, int]
"""Height and width in pixels, multiples of 32."""
SINGLES: tuple[Size, ...] = (
    (32, 64), (32, 96), (32, 160), (64, 96), (64, 128), (64, 160), (96, 128),
)  # fmt: skip
PAIRS: tuple[tuple[Size, Size], ...] = (
    ((32, 64), (32, 64)), ((32, 96), (32, 96)), ((64, 96), (64, 96)), ((32, 64), (64, 96)),
    ((64, 96), (32, 64)), ((64, 128), (32, 96)),
)  # fmt: skip
Shape = tuple[Size, ...]
"""The sizes of the pictures of one problem; problems of one shape are computed together."""
SHAPES: tuple[Shape, ...] = ((), *((size,) for size in SINGLES), *PAIRS)
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
_HERE = "\0"
"""Where a picture stands in the text of a problem."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A picture: its digits with their colours, its size, and the seed of how it is drawn."""

    digits: str
    colours: tuple[str, ...]
    size: Size
    seed: str


@dataclass(frozen=True, slots=True)
class PictureProblem:
    """A problem with the pictures that it is about.

    Attributes:
        kind: `read`, `colour`, `sum`, `larger` or `add`; `add` has no picture.
        pictures: the pictures, in the order of their places in the text.
        text: the user's message, with a NUL character for each picture.
        answer: the text of the answer.
        final: what stands behind `Answer: `.
        level: the digits of the longest number.
    """

    kind: str
    pictures: tuple[Drawn, ...]
    text: str
    answer: str
    final: str
    level: int

    @property
    def shape(self) -> Shape:
        return tuple(picture.size for picture in self.pictures)

    @property
    def question(self) -> str:
        return self.text.replace(_HERE, "").strip()


def picture_problems(split: Split, shape: Shape, seed: str) -> Iterator[PictureProblem]:
    """Yield problems of a shape without end, the same ones for the same arguments.

    Held-out ones have their pictures before the text.
    """
    random = Random(f"{split} {shape} {seed}")
    makers = (_sum_of_text, _about_one, _about_two)
    while True:
        problem = makers[len(shape)](random, split, shape)
        if split == "held_out":
            problem = replace(problem, text=_HERE * len(shape) + problem.question)
        yield problem


def held_out_problems(count: int, seed: int) -> list[PictureProblem]:
    """Return `count` held-out problems of all shapes; one in ten has no picture."""
    random = Random(f"shapes {seed}")
    streams = {shape: picture_problems("held_out", shape, str(seed)) for shape in SHAPES}
    found = []
    for index in range(count):
        singles = [(size,) for size in SINGLES]
        shape = random.choice(PAIRS if index % 10 in (2, 5, 8) else singles)
        found.append(next(streams[() if index % 10 == 9 else shape]))
    return found


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


def png(picture: Drawn) -> bytes:
    """Draw a picture as the bytes of a PNG file."""
    file = io.BytesIO()
    draw(picture).save(file, "png", optimize=True)
    return file.getvalue()


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return font


def _largest_font(digits: int, size: Size) -> int:
    return int(min(0.95 * size[0], size[1] / (0.62 * digits), 56))


def _about_one(random: Random, split: Split, shape: Shape) -> PictureProblem:
    (size,) = shape
    picture = _picture(random, split, size, MOST_DIGITS)
    level = len(picture.digits)
    if random.random() < 0.6:
        question = random.choice(("What number is this?", "Read the number.", "Which number?"))
        return _problem(random, "read", (picture,), question, "", picture.digits, level)
    place = random.randrange(level)
    question = f"What colour is the {PLACES[place]} digit?"
    return _problem(random, "colour", (picture,), question, "", picture.colours[place], level)


def _about_two(random: Random, split: Split, shape: Shape) -> PictureProblem:
    first, second = (_picture(random, split, size, 3) for size in shape)
    a, b = int(first.digits), int(second.digits)
    level = max(len(first.digits), len(second.digits))
    if a != b and random.random() < 0.4:
        final = "first" if a > b else "second"
        question = "Which number is larger, the first or the second?"
        return _problem(random, "larger", (first, second), question, f"{a} and {b}. ", final, level)
    question = random.choice(("What is the sum of the numbers?", "Add the two numbers."))
    working = f"{a}+{b}: {', '.join(sum_steps(a, b))}. "
    return _problem(random, "sum", (first, second), question, working, str(a + b), level)


def _sum_of_text(random: Random, split: Split, shape: Shape) -> PictureProblem:
    a, b = (_number(random, split, random.randint(1, 3)) for _ in range(2))
    question = random.choice(("What is {}+{}?", "Calculate {}+{}.")).format(a, b)
    working = f"{a}+{b}: {', '.join(sum_steps(int(a), int(b)))}. "
    level = max(len(a), len(b))
    return _problem(random, "add", (), question, working, str(int(a) + int(b)), level)


def _problem(
    random: Random,
    kind: str,
    pictures: tuple[Drawn, ...],
    question: str,
    working: str,
    final: str,
    level: int,
) -> PictureProblem:
    marks = _HERE * len(pictures)
    behind = random.random() < 0.3 and bool(pictures)
    text = f"{question} {marks}" if behind else f"{marks}{question}"
    return PictureProblem(kind, pictures, text, f"{working}Answer: {final}", final, level)


def _picture(random: Random, split: Split, size: Size, most: int) -> Drawn:
    fitting = [n for n in range(1, most + 1) if _largest_font(n, size) >= SMALLEST_FONT + 2]
    digits = _number(random, split, random.choice(fitting))
    names = list(COLOURS)
    one = random.choice(names)
    many = random.random() < 0.7
    colours = tuple(random.choice(names) if many else one for _ in digits)
    return Drawn(digits, colours, size, str(random.getrandbits(64)))


def _number(random: Random, split: Split, digits: int) -> str:
    """Draw a number; some of three or more digits are held out."""
    while True:
        number = str(random.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1))
        if digits < 3 or is_held_out(f"picture {number}") == (split == "held_out"):
            return number
