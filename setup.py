"""Package metadata. The folders kernels/, launch/ and configs/ stand at the top of the repository but are installed inside
bitkv_dist: a top-level package named `kernels` would shadow the one of that name that transformers looks for.
"""

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CompileError, LinkError

MAPPED = ("kernels", "launch", "configs")
package_dir = {f"bitkv_dist.{name}": name for name in MAPPED}
packages = find_packages(include=["bitkv_dist", "bitkv_dist.*"])
for name in MAPPED:
    packages += [f"bitkv_dist.{name}", *(f"bitkv_dist.{name}.{inner}" for inner in find_packages(name))]


# The CPU kernels are compiled once per instruction set, side by side; the library picks one at run time. No fused multiply-add:
# encoding must give the same bytes everywhere.
CPU_FLAGS = ["-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread"]
if "-O" not in os.environ.get("CXXFLAGS", ""):
    CPU_FLAGS.append("-O3")
CPU_SOURCES = {"api.cpp": [], "decoder.cpp": [], "words.cpp": [], "portable.cpp": []}
if platform.machine() in ("x86_64", "AMD64"):
    CPU_FLAGS.append("-DBITKV_X86")
    CPU_SOURCES["avx2.cpp"] = ["-mavx2", "-mfma", "-mf16c"]
    CPU_SOURCES["avxvnni.cpp"] = ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"]
    AVX512 = [
        "-mfma",
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mavx512vnni",
        "-mavx512vbmi",
        "-mgfni",
        "-mf16c",
        "-mprefer-vector-width=512",
    ]
    CPU_SOURCES["avx512.cpp"] = AVX512
    CPU_SOURCES["avx512bf16.cpp"] = [*AVX512, "-mavx512bf16"]


class BuildKernels(build_ext):
    """Compiles each source with its own flags. Without a working compiler the package installs all the same and says so."""

    def build_extension(self, ext: Extension) -> None:
        try:
            # Most of the time goes into avxvnni.cpp and avx512.cpp, which need not wait for each other.
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                compiling = [pool.submit(self.compile_source, source, flags, ext) for source, flags in CPU_SOURCES.items()]
            # Those without flags come first: of a function that several of them hold, the linker keeps the one that runs
            # everywhere.
            objects = [compiled for source in compiling for compiled in source.result()]
            self.compiler.link_shared_object(
                objects, self.get_ext_fullpath(ext.name), extra_postargs=["-pthread"], target_lang="c++"
            )
        except (BaseError, CompileError, LinkError, OSError) as error:
            print(
                f"bitkv_dist: the CPU kernels were not built ({error}); plain torch will do their work, slowly", file=sys.stderr
            )

    def compile_source(self, source: str, flags: list[str], ext: Extension) -> list[str]:
        """The object files of one source."""
        arguments = {"extra_postargs": CPU_FLAGS + flags, "depends": ext.depends}
        return self.compiler.compile([f"kernels/cpu/{source}"], self.build_temp, **arguments)


setup(
    name="bitkv_dist",
    version="0.1.0",
    description="Distributed long-context LLM inference over a bit-plane packed, sequence-sharded KV cache",
    python_requires=">=3.11",
    packages=packages,
    package_dir=package_dir,
    package_data={"bitkv_dist.configs": ["*.yaml", "*.txt"]},
    ext_modules=[
        Extension(
            "bitkv_dist.kernels.cpu._bitkv_cpu",
            [f"kernels/cpu/{source}" for source in CPU_SOURCES],
            depends=glob("kernels/cpu/*.hpp"),
        )
    ],
    cmdclass={"build_ext": BuildKernels},
    entry_points={"console_scripts": ["bitkv = bitkv_dist.launch.cli:main"]},
)
