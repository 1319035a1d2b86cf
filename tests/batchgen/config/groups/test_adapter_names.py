"""The names that adapters get from their paths."""

import pytest

from batchgen.config.groups.adapter_names import named_places


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("user/lora", "lora"),
        ("user/lora@v2", "lora"),
        ("user/lora@refs/pr/1", "lora"),
        ("/runs/step@2/lora", "lora"),
        ("runs/2024/lora", "lora"),
        ("/runs/lora@2", "lora"),
    ],
)
def test_an_adapter_has_the_last_part_of_its_path_without_a_revision(path: str, name: str) -> None:
    assert named_places(path) == {name: path}
