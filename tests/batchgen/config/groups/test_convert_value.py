"""Keys of a group are the fields that its dataclass can be made with."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from batchgen.config.groups.convert_value import build
from batchgen.util.errors import ConfigError


@dataclass
class Group:
    size: int = 1
    kind: ClassVar[str] = "plain"
    total: int = field(init=False, default=0)


@pytest.mark.parametrize("key", ["kind", "total", "other"])
def test_what_is_no_argument_of_the_class_is_no_key(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^group.{key} is not a key: choose among size$"):
        build(Group, {key: "x"}, "group")
    assert build(Group, {"size": 2}, "group") == Group(2)
