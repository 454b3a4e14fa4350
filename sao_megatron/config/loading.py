"""Reading and writing recipes."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from sao_megatron.config.run import RunConfig
from sao_megatron.errors import UserError
from sao_megatron.files import write_whole

_WHOLE = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$")


class _Loader(yaml.SafeLoader):
    """YAML in which, as in YAML 1.2, 10:00:00 is a text, and not the number 36,000, and 1e-6 a number; and no key is
    given twice."""

    def construct_mapping(self, node, deep=False):
        """Of two equal keys PyYAML takes the last without a word, and what the first said would be lost."""
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, _WHOLE if tag.endswith(":int") else pattern) for tag, pattern in resolvers]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"),
                              list("-+0123456789"))


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def load(path: str | Path, overrides: list[str] = ()) -> RunConfig:
    """Read a recipe and apply `a.b=value` overrides (values are YAML). Raises UserError naming the key at fault."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"recipe {path} does not exist: give the path of a YAML file such as "
                        f"configs/guess-number-cpu.yaml")
    try:
        data = yaml.load(path.read_text(), _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"recipe {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise UserError(f"recipe {path} must be a mapping of sections, got {type(data).__name__}")
    return parse(overridden(data, overrides), str(path))


def overridden(data: dict, overrides: list[str]) -> dict:
    """`data` itself, changed by `a.b=value` overrides. Raises UserError."""
    for override in overrides:
        _override(data, override)
    return data


def _override(data: dict, override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r} is not of the form key.subkey=value")
    *parents, leaf = key.split(".")
    for parent in parents:
        child = data.setdefault(parent, {})
        if not isinstance(child, dict):
            raise UserError(f"override {override!r}: {parent!r} is not a section")
        data = child
    try:
        data[leaf] = yaml.load(value, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"override {override!r}: the value is not valid YAML: {' '.join(str(error).split())}") from None


def parse(data: dict, source: str = "config") -> RunConfig:
    """Validate a mapping. Raises UserError with one sentence for the first fault."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        faults = error.errors()
        first = faults[0]
        key = ".".join(str(part) for part in first["loc"]) or "config"
        if first["type"] == "extra_forbidden":
            what = f"unknown key; known keys here: {', '.join(_known_keys(first['loc'][:-1]))}"
        elif first["type"] == "missing":
            what = "this key is required"
        else:
            what = first["msg"].removeprefix("Value error, ")
            if not isinstance(first["input"], dict | BaseModel):
                what += f" (got {first['input']!r})"
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise UserError(f"{source}: {key}: {what}{more}") from None


def _known_keys(location: tuple) -> list[str]:
    model: Any = RunConfig
    for part in location:
        model = get_args(model)[1] if get_origin(model) is dict else model.model_fields[part].annotation
    return list(model.model_fields)


def save(config: RunConfig, path: Path) -> None:
    """Write the resolved config, every default spelled out; a run that goes on replaces its own, and a crash meanwhile
    must not cost it."""
    write_whole(path, yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False))
