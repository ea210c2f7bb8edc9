"""Configuration files: the presets that come with the package, or a path to a YAML file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from bitkv_dist.rules import near_miss


def preset_names() -> list[str]:
    """Names of the presets that come with the package."""
    folder = resources.files("bitkv_dist.configs")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def read_preset(name_or_path: str) -> dict[str, Any]:
    """The mapping in a preset (a name) or in a YAML file (a path): empty for an empty file, unchecked."""
    try:
        tree = yaml.load(_text(name_or_path), Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "unreadable characters"
        raise ValueError(f"config {name_or_path!r}: not valid YAML ({problem}{where}); correct the file") from None
    if tree is not None and not isinstance(tree, dict):
        raise ValueError(f"config {name_or_path!r}: must be a mapping of sections; write section: and its fields below")
    return tree or {}


def _text(name_or_path: str) -> str:
    names = preset_names()
    if name_or_path in names:
        return (resources.files("bitkv_dist.configs") / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml") and not path.is_file():
        raise ValueError(f"config {name_or_path!r}: no such preset or file; {near_miss(name_or_path, names)}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"config {name_or_path!r}: cannot be read ({reason}); give a preset or a YAML file") from None


class _UniqueKeys(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key, (key_node, _) in zip(keys, node.value, strict=True):
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        return super().construct_mapping(node, deep)
