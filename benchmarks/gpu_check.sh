#!/usr/bin/env bash
# All that only a GPU can show: see gpu_check.py. PYTHON=... chooses the interpreter; it needs torch, triton and transformers.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
exec "$python" benchmarks/gpu_check.py "$@"
