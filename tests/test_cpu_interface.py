"""The number that the C++ library and the program that calls it share: a library of other sources is refused, not called."""

import hashlib
import os
import re
import shutil
import subprocess
import sys

import pytest
import ranks
import torch

from bitkv_dist.kernels import cpu, dispatch

CPU = torch.device("cpu")
SOURCES = ranks.ROOT / "kernels" / "cpu"
REMEDY = "; rebuild: pip install -e . --no-deps --no-build-isolation"
# Digest of the functions and structs of each number, see `crossing`. Whoever changes them raises the number in __init__.py and
# interface.hpp and writes the new digest here.
DIGESTS = {1: "e394a8d953a485c4", 2: "78b4182575cb4053", 3: "af02ce5cd2d223aa", 4: "30baf8fb2f0c5bd6"}


@pytest.fixture
def found(monkeypatch, tmp_path):
    """`cpu.load` with a library that a compiler makes of some C, or with a file of other content."""

    def look(content: str, compiled: bool = True):
        file = tmp_path / "library.so"
        if compiled:
            compiler = shutil.which("cc") or shutil.which("gcc")
            if compiler is None:
                pytest.skip("needs a C compiler")
            (tmp_path / "library.c").write_text(content)
            subprocess.run([compiler, "-shared", "-fPIC", "-o", file, tmp_path / "library.c"], check=True)
        else:
            file.write_text(content)
        monkeypatch.setenv("BITKV_CPU_LIBRARY", str(file))
        cpu._found.cache_clear()
        return cpu.load()

    yield look
    cpu._found.cache_clear()


@pytest.mark.parametrize(
    ("content", "compiled", "said"),
    [
        ("int other;", True, r"is older than this program \(it does not name its interface\)"),
        ("long long bitkv_interface(void) { return 0; }", True, r"built from other sources \(interface 0, this .* calls \d+\)"),
        ("", False, r"the C\+\+ extension cannot be loaded \(.*file too short\)"),
        ("not a library" * 99, False, r"the C\+\+ extension cannot be loaded \(.*\)"),
    ],
)
def test_a_library_of_other_sources_is_refused_with_the_remedy(found, content, compiled, said):
    assert found(content, compiled) is None
    name, why = dispatch.backend(CPU)
    assert name == "reference" and re.search(said + re.escape(REMEDY), why) and "\n" not in why
    assert not dispatch.on_cpu(CPU)
    with pytest.raises(ValueError, match=f"cpu_isa portable: .*{re.escape(REMEDY)}; or leave it at auto"):
        dispatch.use("portable")


def test_one_of_these_sources_is_taken(found):
    """As far as the number goes; the functions of the real one are tested elsewhere."""
    functions = "".join(f"long long bitkv_{name}(void) {{ return 0; }}" for name in cpu.SIGNATURES if name != "interface")
    library = found(f"long long bitkv_interface(void) {{ return {cpu.INTERFACE}; }} {functions}")
    assert library is not None and library.bitkv_interface() == cpu.INTERFACE


@pytest.mark.parametrize("compiler", ["false", "/no/such/compiler"])
def test_the_package_installs_without_a_compiler_that_works(tmp_path, compiler):
    pytest.importorskip("setuptools")
    places = ["--build-temp", tmp_path / "temp", "--build-lib", tmp_path / "lib"]
    argv = [sys.executable, "setup.py", "build_ext", "--force", *places]
    env = os.environ | {"CC": compiler, "CXX": compiler}
    ended = subprocess.run(argv, cwd=ranks.ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"bitkv_dist: the CPU kernels were not built \(.+\); plain torch will do their work, slowly", ended.stderr)
    assert not list((tmp_path / "lib").rglob("*.so"))


def test_both_sides_name_the_same_number():
    (there,) = re.findall(r"constexpr int64_t INTERFACE = (\d+);", (SOURCES / "interface.hpp").read_text())
    assert int(there) == cpu.INTERFACE


def test_a_changed_interface_has_a_new_number():
    digest = hashlib.sha256(crossing().encode()).hexdigest()[:16]
    assert DIGESTS.get(cpu.INTERFACE) == digest, f"raise INTERFACE on both sides, and note {digest} above"


def test_functions_are_called_with_what_they_take():
    kinds, results = {"float": "f", "int64_t": "i"}, {"void": "", "int64_t": ">i", "const char*": ">s"}
    found = {}
    for head in crossing().splitlines():
        if match := re.fullmatch(r"(.+) bitkv_(\w+)\((.*)\)", head):
            result, name, arguments = match.groups()
            taken = ("p" if "*" in argument else kinds[argument.split()[0]] for argument in filter(None, arguments.split(", ")))
            found[name] = "".join(taken) + results[result]
    assert found == cpu.SIGNATURES


def crossing() -> str:
    """What crosses between Python and C++, without comments and layout: the heads of all exported functions, and every struct
    that they, or those structs, are made of."""
    text = "\n".join(re.sub(r"//.*", "", path.read_text()) for path in sorted(SOURCES.glob("*.[ch]pp")))
    words = " ".join(text.split())
    heads = sorted(set(re.findall(r"[\w*]+(?: [\w*]+)* bitkv_\w+\([^)]*\)(?= \{)", words)))
    structs, waiting = {}, " ".join(heads)
    while named := set(re.findall(r"\b[A-Z]\w+\b", waiting)) - structs.keys():
        for name in named:
            body = re.search(rf"struct {name} \{{.*?\}};", words)
            structs[name] = body[0] if body else ""
        waiting = " ".join(structs.values())
    assert len(heads) > 10 and structs.get("Layout")
    return "\n".join([*heads, *(structs[name] for name in sorted(structs))])



def test_where_there_is_a_compiler_the_kernels_are_built():
    """Their tests skip without a library; a build that fails must not pass unseen."""
    if shutil.which("g++") or shutil.which("c++"):
        assert cpu.load() is not None, cpu.reason()


@pytest.mark.skipif(shutil.which("g++") is None, reason="without a compiler there are no kernels")
def test_where_there_is_a_compiler_there_are_kernels():
    """Tests of the kernels are skipped without them; this one is not."""
    assert cpu.load() is not None, cpu.reason()
