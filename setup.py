"""Package metadata. The folders kernels/, launch/ and configs/ stand at the top of the repository but are installed inside
bitkv_dist: a top-level package named `kernels` would shadow the one of that name that transformers looks for.
"""

from setuptools import find_packages, setup

MAPPED = ("kernels", "launch", "configs")
package_dir = {f"bitkv_dist.{name}": name for name in MAPPED}
packages = find_packages(include=["bitkv_dist", "bitkv_dist.*"])
for name in MAPPED:
    packages += [f"bitkv_dist.{name}", *(f"bitkv_dist.{name}.{inner}" for inner in find_packages(name))]

setup(
    name="bitkv_dist",
    version="0.1.0",
    description="Distributed long-context LLM inference over a bit-plane packed, sequence-sharded KV cache",
    python_requires=">=3.11",
    packages=packages,
    package_dir=package_dir,
    package_data={"bitkv_dist.configs": ["*.yaml", "*.txt"]},
    entry_points={"console_scripts": ["bitkv = bitkv_dist.launch.cli:main"]},
)
