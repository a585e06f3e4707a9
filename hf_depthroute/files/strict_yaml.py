"""YAML files of one mapping, read strictly: what a parser would change is refused, or stays text.

To YAML 1.1, and so to PyYAML, `0256` is 174 and `1:30` is 90. Other readers, the Hub's among them,
take neither for such a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .shown import OneLine

_MAX_BYTES = 1 << 20
_MAX_DEPTH = 32
_OTHER_BASE = re.compile(r"[-+]?0[0-7_]*[1-7][0-7_]*|.*:.*")  # of 8, of 60


class YamlError(OneLine, ValueError):
    """A file cannot be used. The message is one line and names the file."""


def read_mapping(
    path: Path, key_name: Callable[[str], str] = str, as_written: bool = False
) -> dict[Any, Any]:
    """The mapping in a file; empty when the file is. Keys of the same `key_name` are one key.

    With `as_written`, a number with a decimal point is the text that stands there: `2.10` may be
    one, or a title.

    Raises:
        YamlError: The file cannot be read, is larger than 1 MiB, or holds what `parse_mapping`
            refuses.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise YamlError(f"{path}: larger than 1 MiB; this is no config file")
        text = content.decode("utf-8")
    except OSError as error:
        raise YamlError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise YamlError(f"{path}: not valid YAML: {error}") from error
    return parse_mapping(text, str(path), key_name, as_written)


def parse_mapping(
    text: str, name: str, key_name: Callable[[str], str] = str, as_written: bool = False
) -> dict[Any, Any]:
    """The mapping in `text`, of a file called `name`; as `read_mapping`.

    Raises:
        YamlError: It is no YAML, holds anything but a mapping, repeats a key, of which parsers
            silently keep the last, has an alias or a merge key, which can explode, or nests more
            than 32 deep.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                raise YamlError(f"{name}: YAML aliases are not supported; write the value out")
            if self.depth >= _MAX_DEPTH:
                raise YamlError(f"{name}: not valid YAML: nests more than {_MAX_DEPTH} deep")
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[object, object]:
            seen = set()
            for key_node, _ in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":  # its keys would not come by here
                    raise YamlError(
                        f"{name}: YAML merge keys (<<) are not supported; write the values out"
                    )
                key = key_name(str(key_node.value))
                if key in seen:
                    raise YamlError(f"{name}: key {key_node.value!r} appears twice; keep one")
                seen.add(key)
            return super().construct_mapping(node, deep)

    def number(loader: Loader, node: Any) -> float | str:
        if as_written or _OTHER_BASE.fullmatch(node.value):
            return str(node.value)
        return float(loader.construct_yaml_float(node))

    def whole_number(loader: Loader, node: Any) -> int | str:
        if _OTHER_BASE.fullmatch(node.value):
            return str(node.value)
        value = int(loader.construct_yaml_int(node))
        # No option takes it, and Python may refuse to print it.
        if not -(1 << 63) <= value < 1 << 63:
            raise YamlError(
                f"{name}: line {node.start_mark.line + 1}: {node.value[:20]}... is too large a "
                "number"
            )
        return value

    Loader.add_constructor("tag:yaml.org,2002:float", number)
    Loader.add_constructor("tag:yaml.org,2002:int", whole_number)
    try:
        loaded = yaml.load(text, Loader=Loader)
    except YamlError:
        raise
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise YamlError(f"{name}: not valid YAML: {str(error) or type(error).__name__}") from error
    if loaded is not None and not isinstance(loaded, dict):
        raise YamlError(
            f"{name}: must be a mapping of names to values, not a {type(loaded).__name__}"
        )
    return loaded or {}
