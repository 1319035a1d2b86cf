"""Lets Hydra read choices in the user's folders as plain YAML, within limits. `compose_config.py`
adds these folders to Hydra's search path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult

from batchgen.config.compose.value_references import RESOLVERS_OF_HYDRA, refuse_resolvers
from batchgen.util.text.plain_yaml import MOST_BYTES, load_yaml

# The scheme of the URLs by which Hydra finds `PlainFiles`: plain:///FOLDER.
_SCHEME = "plain"


class PlainFiles(FileConfigSource):
    """A folder of choices, as a source of Hydra. A file beyond the limits of `load_yaml` is a
    ConfigError."""

    @staticmethod
    def scheme() -> str:
        return _SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path) / self._normalize_file_name(config_path)
        if path.exists():  # Hydra reports missing files
            with path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)  # one more, by which load_yaml sees a long file
            refuse_resolvers(load_yaml(content, str(path)), RESOLVERS_OF_HYDRA)
        return super().load_config(config_path)


def search_path(folders: Sequence[Path]) -> list[str]:
    """The argument with which Hydra also looks for choices in these folders; none without
    folders."""
    if not folders:
        return []
    Plugins.instance().register(PlainFiles)
    paths = ",".join(f"'{_SCHEME}://{folder.absolute()}'" for folder in folders)
    return [f"hydra.searchpath=[{paths}]"]
