"""The tree is the design: imports point one way, importing changes nothing, and the README names files that exist."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# As data flows. Each may import what stands to its right, never to its left.
FLOW = ("launch", "evaluate", "engine", "model", "attention", "cache", "codec", "kernels")
# What any of them may import; these in turn import nothing that flows.
CONFIG = ("config", "cache_config", "rules", "preset", "schedule", "split", "calibrated")
SOURCES = sorted(path for folder in ("bitkv_dist", "kernels", "launch") for path in (ROOT / folder).rglob("*.py"))


def noun(path: Path) -> str:
    """The part of the design a file belongs to: its folder, or its name when it stands directly in bitkv_dist."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] != "bitkv_dist" else parts[1]


def imports(path: Path) -> list[str]:
    """Every module a file imports, also inside functions, but not for type checkers alone; ours as bitkv_dist.X."""
    found = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import; write bitkv_dist.X"
            # `from bitkv_dist import model` imports bitkv_dist.model; `from bitkv_dist import __version__` nothing more.
            found.extend(f"{node.module}.{alias.name}" if node.module == "bitkv_dist" else node.module for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def arrows() -> dict[str, set[str]]:
    """noun -> the other nouns it imports."""
    graph: dict[str, set[str]] = {}
    for path in SOURCES:
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("bitkv_dist.")}
        graph.setdefault(noun(path), set()).update(ours - {noun(path), "__version__"})
    return graph


def test_data_flows_one_way():
    graph = arrows()
    for position, name in enumerate(FLOW):
        assert not graph.get(name, set()) & set(FLOW[:position]), f"{name} imports what uses it"


def test_no_circles():
    graph, done = arrows(), set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for imported in sorted(graph.get(name, ())):
                walk(imported, (*trail, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def test_leaves():
    graph = arrows()
    assert graph["kernels"] == set()
    for name in CONFIG:
        assert graph[name] <= set(CONFIG)
    assert {name for name, imported in graph.items() if "parallel" in imported} <= {"agreement", "engine", "launch", "plan"}
    assert not graph["parallel"] & set(FLOW) - {"codec", "kernels"}


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("deepspeed", ("bitkv_dist/parallel",)),
        ("mpi4py", ("bitkv_dist/parallel",)),
        ("torch.distributed", ("bitkv_dist/parallel",)),
        ("kernels", ()),
        ("launch", ()),
        ("configs", ()),
    ],
)
def test_who_imports_what(package, allowed):
    for path in SOURCES:
        if any(name == package or name.startswith(f"{package}.") for name in imports(path)):
            assert path.relative_to(ROOT).as_posix().startswith(allowed), f"{path} imports {package}"


def test_config_needs_no_torch():
    code = "import sys, bitkv_dist.config; print('torch' in sys.modules)"
    assert python(code) == "False"


def test_only_launch_prints():
    for path in SOURCES:
        if noun(path) != "launch":
            calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
            assert not any(ast.unparse(call.func) == "print" for call in calls), f"{path} prints"


def test_kernels_init_is_empty():
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""


def test_every_package_is_installed():
    """setup.py finds packages by their __init__.py."""
    for path in SOURCES:
        assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"


def test_importing_has_no_side_effects():
    modules = sorted(
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for path in SOURCES
        if path.parts[len(ROOT.parts)] == "bitkv_dist" and path.name != "__init__.py"
    )
    code = f"""
import importlib, logging, random, sys, threading
import torch
state, generator, handlers = torch.random.get_rng_state(), random.getstate(), list(logging.getLogger().handlers)
threads = torch.get_num_threads()
for name in {modules}:
    importlib.import_module(name)
from transformers import AttentionInterface
problems = [
    "registers attention" * ("bitkv" in AttentionInterface().valid_keys()),
    "starts torch.distributed" * torch.distributed.is_initialized(),
    "imports deepspeed" * ("deepspeed" in sys.modules),
    "imports mpi4py" * ("mpi4py" in sys.modules),
    "starts CUDA" * torch.cuda.is_initialized(),
    "draws random numbers" * (not torch.equal(state, torch.random.get_rng_state()) or generator != random.getstate()),
    "sets up logging" * (handlers != logging.getLogger().handlers),
    "sets the number of threads" * (threads != torch.get_num_threads()),
    "starts threads" * (threading.active_count() > 1),
]
print(", ".join(filter(None, problems)) or "nothing")
"""
    assert python(code) == "nothing"


def test_kernels_folder_does_not_pass_for_the_package_of_that_name():
    """From the repository's root, where `kernels` can be found, models of transformers still work."""
    code = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=31, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
print(tuple(LlamaForCausalLM(config)(torch.tensor([[1, 2]])).logits.shape))
"""
    assert python(code, safe_path=False) == "(1, 2, 31)"
    assert python("from importlib.util import find_spec; print(find_spec('kernels'))") == "None"


def test_readme_names_files_that_exist():
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"(?<![\w/.-])((?:launch|configs|tests|benchmarks|kernels|bitkv_dist)/[\w./-]*\w)", readme))
    assert named, "the README names no file"
    assert not {name for name in named if not (ROOT / name).exists()}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([\w-]+)", "\n".join(re.findall(r"```.*?```", readme, re.DOTALL)))) <= targets


def python(code: str, safe_path: bool = True) -> str:
    """What `code` prints in a fresh interpreter at the repository's root; safe_path: without the root in sys.path."""
    command = [sys.executable, *(["-P"] if safe_path else []), "-c", code]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300).stdout.strip()
