"""Pydantic's tagged unions: what the grammar of a schema lets through is valid for the model."""

from __future__ import annotations

import json
import random
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from batchgen.engine.constraint.json_schema.lower_schema import check_schema
from batchgen.engine.interface.constraint_error import ConstraintError
from tests.engine.constraint.test_json_schema import accepts, compile_schema, walk


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"  # not required in the schema
    lives: int


class Dog(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: bool
    kind: Literal["dog", "hound"]


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


class Colour(StrEnum):
    BLACK = "black"
    WHITE = "white"


class Black(BaseModel):
    kind: Literal["bird"]
    colour: Literal[Colour.BLACK] = Colour.BLACK


class White(BaseModel):
    kind: Literal["bird"]
    colour: Literal[Colour.WHITE]


Bird = Annotated[Black | White, Field(discriminator="colour")]


class Owner(BaseModel):
    pet: Pet
    other: Pet | None = None
    birds: Annotated[list[Bird], Field(max_length=2)]


class Nested(RootModel[Annotated[Bird | Cat, Field(discriminator="kind")]]):
    pass


class Number(BaseModel):
    op: Literal["number"] = "number"
    value: bool


class Not(BaseModel):
    op: Literal["not"] = "not"
    of: Expression


class Both(BaseModel):
    op: Literal["and", "or"]
    parts: Annotated[list[Expression], Field(max_length=2)]


Expression = Annotated[Number | Not | Both, Field(discriminator="op")]


class Aliased(BaseModel):
    type: Literal["a"] = Field(alias="@type")


class AliasedToo(BaseModel):
    type: Literal["b"] = Field(alias="@type")


class Tree(RootModel[Expression]):
    pass


class Aliases(RootModel[Annotated[Aliased | AliasedToo, Field(discriminator="type")]]):
    pass


Not.model_rebuild()
Both.model_rebuild()
MODELS: dict[type[BaseModel], tuple[list[Any], list[Any]]] = {
    RootModel[Pet]: (
        [{"kind": "cat", "lives": 9}, {"name": True, "kind": "hound"}],
        [{"lives": 9}, {"kind": "dog", "lives": 9}, {"name": True, "kind": "cat"}],
    ),
    Owner: (
        [
            {"pet": {"kind": "cat", "lives": 1}, "other": None, "birds": []},
            {
                "pet": {"name": False, "kind": "dog"},
                "birds": [
                    {"kind": "bird", "colour": "black"},
                    {"kind": "bird", "colour": "white"},
                ],
            },
        ],
        [{"pet": {"lives": 1}, "birds": []}, {"pet": {"kind": "cat", "lives": 1}, "birds": [{}]}],
    ),
    Nested: (
        [{"kind": "bird", "colour": "black"}, {"kind": "cat", "lives": 2}],
        [{"kind": "bird"}, {"colour": "black"}, {"kind": "cat", "colour": "white"}],
    ),
    Tree: (
        [
            {"op": "number", "value": True},
            {"op": "not", "of": {"op": "or", "parts": [{"op": "number", "value": False}]}},
        ],
        [{"value": True}, {"op": "not", "of": {"value": True}}, {"op": "or", "value": True}],
    ),
    Aliases: ([{"@type": "a"}, {"@type": "b"}], [{}, {"type": "a"}]),
}
"""Models → values that their grammars let through, and values that neither lets through."""


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__[:9])
def test_output_is_of_the_model(model: type[BaseModel]) -> None:
    schema = model.model_json_schema()
    before = json.dumps(schema)
    grammar = compile_schema(schema)
    assert json.dumps(schema) == before
    good, bad = MODELS[model]
    for value in good:
        model.model_validate(value)
        assert accepts(grammar, json.dumps(value, separators=(",", ":"))), value
    for value in bad:
        with pytest.raises(ValidationError):
            model.model_validate(value)
        assert not accepts(grammar, json.dumps(value, separators=(",", ":"))), value
    rng = random.Random(0)
    for _ in range(5):
        text = walk(grammar, rng)
        if text is not None:
            model.model_validate_json(text)


def branch(tag: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"t": tag, "x": {"type": "null"}}, "required": ["x"]}


def test_a_mapping_says_which_tags_lead_to_a_branch() -> None:
    """As in OpenAPI, where branches are told apart by their names alone."""
    schema = {
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        "discriminator": {
            "propertyName": "t",
            "mapping": {"a": "#/$defs/A", "b": "#/$defs/B", "c": "#/$defs/B"},
        },
        "$defs": {"A": branch({"type": "string"}), "B": branch({"type": "string"})},
    }
    as_any = {"anyOf" if key == "oneOf" else key: value for key, value in schema.items()}
    for one in (schema, as_any):
        grammar = compile_schema(one)
        found = [tag for tag in "abcd" if accepts(grammar, f'{{"t":"{tag}","x":null}}')]
        assert found == ["a", "b", "c"] and not accepts(grammar, '{"x":null}')


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"discriminator": {"propertyName": "t"}}, "next to `oneOf` or `anyOf`"),
        ({"discriminator": "t", "oneOf": [{}]}, "must be {propertyName: NAME}"),
        (
            {
                "discriminator": {"propertyName": "t"},
                "oneOf": [branch({"const": "a"}), branch({"type": "string"})],
            },
            "the branches 0 and 1 may both match",
        ),
    ],
)
def test_what_tells_no_branches_apart_is_refused(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(ConstraintError, match=why):
        check_schema(schema)


def test_a_property_may_be_called_discriminator() -> None:
    grammar = compile_schema({"type": "object", "properties": {"discriminator": {"const": 1}}})
    assert accepts(grammar, '{"discriminator":1}')
