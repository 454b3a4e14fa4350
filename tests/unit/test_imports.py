"""Who may import whom (the picture is in the design notes): read from the sources, whether or not a line ever runs."""
import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sao_megatron"

# Lower may not import higher, and those of one level may not import each other.
LEVELS = [
    {"cli"},
    {"submission"},
    {"roles", "launcher", "pretraining", "conversion"},
    {"watch"},
    {"engine_watch", "sandbox_watch", "hang"},
    {"placement"},
    {"supervisor"},
    {"rollout", "learner"},
    {"weights", "telemetry"},
    {"engine", "sandbox"},
    {"trajectory"},
    {"algorithm"},
    {"run_folder"},
    {"checkpoints"},
    {"config", "device", "child", "blame", "heartbeat"},
    {"errors", "files"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
OUTSIDE = {"launch", "tools", "slurm", "tests"}


def imports_of(path: Path) -> set[str]:
    """Dotted names that a source file imports anywhere, `from a import b` as a.b (b may be a module)."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: line {node.lineno}: import by absolute name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


GRAPH = {module_name(path): imports_of(path) for path in sorted(PACKAGE.rglob("*.py"))}


def part(name: str) -> str:
    """`rollout` of sao_megatron.rollout.episode; '' for the package itself."""
    return name.split(".")[1] if "." in name else ""


def inside(name: str) -> bool:
    return name.split(".")[0] == "sao_megatron"


# If this fails, the reading of the sources found nothing and the other tests here hold nothing.
def test_the_sources_were_read():
    assert "sao_megatron.config.RunConfig" in GRAPH["sao_megatron.launcher"]
    assert "sao_megatron.learner.loop" in GRAPH["sao_megatron.roles"]  # imported inside a function


# If this fails, a part of the package has no place in the order of imports: give it one in LEVELS.
def test_every_part_has_a_level():
    assert {part(name) for name in GRAPH} - {""} <= LEVEL.keys()


# If this fails, a module depends on one above or beside it, and can no longer be read or tested without that.
@pytest.mark.parametrize("name", sorted(GRAPH))
def test_imports_point_down(name):
    own = part(name)
    wrong = {target for target in GRAPH[name] if inside(target) and part(target) in LEVEL and part(target) != own
             and (own == "" or LEVEL[part(target)] <= LEVEL[own])}
    assert not wrong


# If this fails, the package needs files that are not installed with it.
@pytest.mark.parametrize("name", sorted(GRAPH))
def test_nothing_imports_the_scripts(name):
    assert not {target for target in GRAPH[name] if target.split(".")[0] in OUTSIDE}


def reached_from(start: str) -> dict[str, str]:
    """Every name imported by modules under `start` and by whatever of ours these import: name -> who imports it."""
    reached: dict[str, str] = {}
    todo = [name for name in GRAPH if name == start or name.startswith(start + ".")]
    seen = set(todo)
    while todo:
        module = todo.pop()
        for target in GRAPH[module]:
            reached.setdefault(target, module)
            parents = {target, target.rpartition(".")[0]}  # `from package.module import name`
            todo += (new := [name for name in parents if name in GRAPH and name not in seen])
            seen.update(new)
    return reached


# If one fails, the rollout side cannot run on a machine without Megatron, or the two sides no longer meet only in the
# store and the engines' protocol.
@pytest.mark.parametrize(("side", "forbidden"), [
    ("sao_megatron.rollout", ("megatron", "sao_megatron.learner", "sao_megatron.weights")),
    ("sao_megatron.engine", ("megatron", "sao_megatron.learner", "sao_megatron.rollout")),
    ("sao_megatron.sandbox", ("torch", "megatron", "sao_megatron.rollout", "sao_megatron.trajectory")),
    ("sao_megatron.trajectory", ("megatron", "sglang", "sao_megatron.learner", "sao_megatron.rollout")),
    ("sao_megatron.learner", ("sglang", "sao_megatron.rollout")),
    ("sao_megatron.algorithm", ("megatron", "sglang", "sao_megatron.config", "sao_megatron.trajectory")),
])
def test_sides_do_not_reach(side, forbidden):
    reached = reached_from(side)
    wrong = {f"{importer} imports {name}" for name, importer in reached.items()
             for prefix in forbidden if name == prefix or name.startswith(prefix + ".")}
    assert not wrong
