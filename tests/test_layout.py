"""The house as a test: imports point one way, engines don't import each other, torch stays where it belongs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "planner"

# From the ground up. A module may import from lower floors, and from its own where that is no floor of engines.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("planner", "errors"),
    ("units",),
    ("records", "names", "torchvision_operators", "example_rows", "own_functions", "recomputation", "random_operators"),
    ("arguments", "program", "sharding", "prediction"),
    ("cluster", "local_cluster", "model_profile", "plan", "tp_rules", "model_file", "hugging_face", "shrink"),
    ("graph", "orders", "schedule", "pairing", "runnable", "merged_profile", "cost", "hand_written"),
    ("profiler", "solver", "emitter", "runner"),
    ("report", "peers"),
    ("cli", "__main__"),
)
ENGINES = {"profiler", "solver", "emitter", "runner"}
FLOOR = {name: index for index, names in enumerate(FLOORS) for name in names}
WITH_TORCH = ("planner/profiler/", "planner/runner/", "planner/emitter/runtime/")
WITH_TORCH_INSIDE_FUNCTIONS = (
    "planner/model_file.py",
    "planner/hugging_face.py",
    "planner/shrink.py",
    "planner/recomputation.py",
    "planner/torchvision_operators.py",
)
HEAVY = {"torch", "transformers"}
SLOW_TO_IMPORT = {"torch", "transformers", "ortools", "networkx", "numpy"}

FILES = sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE.parent).as_posix()


def imports(nodes: Iterator[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of what is imported; `from planner import x` yields `planner.x`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}" if node.module == "planner" else str(node.module)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_type_checking(child):
            continue
        yield child
        yield from module_level(child)


def floor_of(name: str) -> str:
    """Return the module or package below planner that a dotted name such as 'planner.solver.search' belongs to."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOOR else "planner"


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "planner" if parts == ("__init__",) else parts[0]


def test_every_module_has_its_floor() -> None:
    assert {room_of(path) for path in FILES} <= set(FLOOR), "place new modules in FLOORS"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    for line, name in imports(ast.walk(ast.parse(path.read_text()))):
        if name.split(".")[0] != "planner":
            continue
        target = floor_of(name)
        if target == room:
            continue
        assert not (room in ENGINES and target in ENGINES), f"line {line}: engine {room} imports engine {target}"
        assert FLOOR[target] <= FLOOR[room], f"line {line}: {room} imports {name}, which stands above it"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_torch_stays_in_its_rooms(path: Path) -> None:
    where = relative(path)
    if where.startswith(WITH_TORCH):
        return
    tree = ast.parse(path.read_text())
    nodes = module_level(tree) if where in WITH_TORCH_INSIDE_FUNCTIONS else ast.walk(tree)
    for line, name in imports(iter(nodes)):
        assert name.split(".")[0] not in HEAVY, f"line {line}: imports {name}"


@pytest.mark.parametrize("path", [path for path in FILES if "/emitter/runtime/" in path.as_posix()], ids=relative)
def test_the_text_of_plans_needs_torch_alone(path: Path) -> None:
    allowed = sys.stdlib_module_names | {"torch", "planner"}
    for line, name in imports(ast.walk(ast.parse(path.read_text()))):
        assert name.split(".")[0] in allowed, f"line {line}: imports {name}"
        if name.split(".")[0] == "planner":
            assert name.startswith("planner.emitter.runtime"), f"line {line}: imports {name}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_the_text_of_plans_is_never_imported(path: Path) -> None:
    if "/emitter/runtime/" in path.as_posix():
        return
    for line, name in imports(ast.walk(ast.parse(path.read_text()))):
        assert not name.startswith("planner.emitter.runtime."), f"line {line}: imports {name}"


def test_the_command_line_starts_light() -> None:
    script = f"import sys, planner.cli.main; print(*sorted({SLOW_TO_IMPORT} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
