# Two commands do all the set-up on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The release of torch of which a CPU build is provided on machines without a GPU. Where your
# package index has none, name one: make run TORCH="torch --index-url URL-OF-PYTORCH-CPU-WHEELS"
TORCH ?= torch==2.13.0
MODEL ?= demo
PROMPT ?= Why is the sky blue?
OLDEST_TRANSFORMERS := 5.17.0
# Tests start many processes: byte code is written once, of what is imported, and not by pip of all.
unexport PYTHONDONTWRITEBYTECODE
export PIP_NO_COMPILE = 1
SOURCES := pyproject.toml CMakeLists.txt $(wildcard csrc/* csrc/*/*)

# On a machine with a GPU: a Python that has torch with CUDA, Transformers and Triton, and where
# the results go. SHAPE is one of tandem bench's shapes.
GPU_PYTHON ?= python3
GPU_OUT ?= build/gpu
SHAPE ?= qwen3-30b-a3b
# Tests with one instruction set of the CPU kernels: make test ISA=portable. Without it they run with
# the best, and one architecture of those whose results depend on the kernels with each that this
# processor has (AVX-VNNI is AVX2 but for products); make test-all-isas has them all.
ISA ?=
# What a test frees stays with its process for the next one: half of the page faults, a tenth of the
# processor's time.
MALLOC := MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=536870912 MALLOC_TOP_PAD_=16777216
SHARED_OUT := -n 3 --dist loadgroup --no-loadscope-reorder
PYTEST := $(MALLOC) $(BIN)/pytest $(SHARED_OUT) $(if $(ISA),--isa $(ISA))

# Which Pythons to build and check wheels with: 3.11 gives one for 3.11, one from 3.12 on gives one for all
# that follow.
WHEEL_PYTHONS ?= $(PYTHON)

.PHONY: clang-kernels release release-files lock test-fast test-figures test-slow test-all-isas fuzz-files wheel check-wheel check-clang check-commits check-format check-threads check-arm test-gpu bench-gpu demo-cut dry-gpu gpu-coverage run test setup check lint types floors unit seam-oldest seam-newest docs docs-models docs-modules docs-datapoints docs-forecast api-docs sanitize fix size clean try-clients try-debian try-disk try-hostile try-readme

run: $(VENV)/runtime.stamp  ## Answer PROMPT with MODEL (default: the demo model, built on first use)
	@$(BIN)/tandem run $(MODEL) -p "$(PROMPT)" --max-new-tokens 100

# The tests take longest, so that what runs beside them takes the processor that they leave: that is
# much while packages are installed.
test:  ## Everything that CI runs
	@$(MAKE) --no-print-directory -j3 -Oline unit clang-kernels sanitize lint floors types fuzz-files

setup: $(VENV)/dev.stamp

check: lint types floors

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/deptry .

types: setup
	nice -n 5 $(BIN)/mypy

floors: setup
	$(BIN)/lint-imports

# Three processes for two cores, as tests of servers wait; which tests must share one is said in
# tests/conftest.py. One process collects first, and so compiles for all what they import.
unit: setup
	@mkdir -p build; $(PYTEST) -n 0 --collect-only -qq >build/collected 2>&1 || { cat build/collected; exit 2; }
	$(PYTEST) -m "not slow"

test-slow: setup  ## What unit leaves out for its time: architectures that are like others, benchmarks run whole, the demo's quality, more traces, all GPUs' compilers
	$(PYTEST) -m slow
	$(PYTEST) -m "not slow" --isa best --hypothesis-profile slow $$(grep -rl "^@given" tests)

test-figures: setup  ## The command of each figure of docs/performance.md at tiny size (minutes; a part of test-slow)
	$(PYTEST) -m figures tests/bench

test-all-isas: setup  ## Every architecture with every instruction set of the CPU kernels, of which unit has some
	$(PYTEST) --isa all -m every_isa

# Formats whose planes, tables and scales others have are left out, and AVX2's kernels where there is AVX-512,
# but for make sanitize FORMATS=all, which emulates the tiles of AMX, too.
FORMATS ?=
SANITIZED := matmul kernels layers attention recurrent quantize tensors blocks crc32c hyper $(if $(FORMATS),$(if $(filter x86_64,$(shell uname -m)),attention_tiles tiles))
FUZZED := experts rows
# Of native code, and as many of model files; make fuzz has an hour of both.
FUZZ_SECONDS ?= 10
sanitize: $(SANITIZED:%=sanitized-%) $(FUZZED:%=fuzzed-%)  ## The native kernels under AddressSanitizer and UndefinedBehaviorSanitizer

sanitized:
	@cmake -S csrc -B build/sanitize -DTANDEM_SANITIZE=ON -DTANDEM_WARNINGS_ARE_ERRORS=ON -DTANDEM_SANITIZE_FORMATS=$(if $(FORMATS),ON,OFF) >/dev/null
	@nice -n 5 cmake --build build/sanitize --parallel 2 --target $(SANITIZED:%=check_%) $(FUZZED:%=fuzz_%) >/dev/null

sanitized-%: sanitized
	nice -n 5 build/sanitize/check_$*

# What was found before, then new sizes and bytes; a find lies in build/fuzz, and once mended in corpus.
fuzzed-%: sanitized
	@mkdir -p build/fuzz/native-$*
	nice -n 5 build/sanitize/fuzz_$* -max_total_time=$$(($(FUZZ_SECONDS) / $(words $(FUZZED)))) -artifact_prefix=build/fuzz/$*- build/fuzz/native-$* csrc/fuzz/corpus/$*

fuzz-files: setup  ## Damaged model files of all kinds for FUZZ_SECONDS; what is found lies in build/fuzz
	nice -n 5 $(BIN)/python -m tests.fuzz all --count 100000000 --seconds $(FUZZ_SECONDS)

fuzz: setup  ## Damaged model files and hostile sizes for an hour; what is found lies in build/fuzz
	@$(MAKE) --no-print-directory FUZZ_SECONDS=600 FORMATS=all $(FUZZED:%=fuzzed-%)
	$(BIN)/python -m tests.fuzz --count 100000000 --seconds 300

wheel:  ## Wheels for Linux x86-64 in build/wheels; needs no compiler (it installs one from the package index)
	wheels/build.sh build/wheels $(WHEEL_PYTHONS)

check-wheel:  ## Each wheel in a new environment without a compiler: the demo model answers
	TORCH="$(TORCH)" wheels/check.sh build/wheels $(WHEEL_PYTHONS)

FAST ?= not slow
test-fast: setup  ## While working: the tests of the packages that changed since SINCE, with one instruction set
	$(BIN)/ruff check .
	$(BIN)/lint-imports >/dev/null
	$(PYTEST) $(if $(ISA),,--isa best) -m "$(FAST)" \
		$$($(BIN)/python -m tests.of_change $(SINCE))

# check-commits, check-format and test-fast look at what changed since this commit.
SINCE ?= @{upstream}
FORMAT_CHANGED := $(BIN)/git-clang-format --binary $(BIN)/clang-format --extensions cpp,hpp
check-format: setup  ## clang-format of the lines of csrc that changed since SINCE
	$(FORMAT_CHANGED) --diff $(SINCE)

check-commits:  ## wheel and check-wheel, if a commit since SINCE touches what wheels are built from
	@wheels/commits.sh "$(SINCE)"

# VERSION has the form 1.2.3. BUILD_PYTHONS and CHECK_PYTHONS: which Pythons (3.11 to 3.13).
release:  ## Check, build, check again and tag VERSION; lists what would be uploaded and uploads nothing
	@wheels/release.sh "$(VERSION)"

release-files:  ## Wheels, source distribution, SBOM and checksums of VERSION in build/release
	@wheels/release_files.sh "$(VERSION)"

try-readme:  ## README's "Install, and run" as it stands, with PYTHON, in a new clone and a new home: minutes
	@wheels/try_readme.sh $(PYTHON)

try-debian:  ## The same in Debian 12 and 13 with nothing else, made by debootstrap; needs root: minutes
	@wheels/debian.sh bookworm trixie

check-clang:  ## All of csrc by the wheels' compiler, which is Clang: syntax and types
	@wheels/clang.sh $(PYTHON)

clang-kernels:  # the library without its check programs, which each night has
	@CHECKS=OFF BUILD=build/clang-library nice -n 5 wheels/clang.sh $(PYTHON)

check-threads:  ## The threads that answer captured steps, copy and read the disk, under ThreadSanitizer: minutes
	@cmake -S csrc -B build/threads -DTANDEM_SANITIZE_THREADS=ON >/dev/null
	@cmake --build build/threads --target check_coordinator --parallel 2 >/dev/null
	build/threads/check_coordinator

check-arm:  ## The kernels compiled for 64-bit Arm; their checks, under qemu
	csrc/checks/arm.sh $(PYTHON)

test-gpu:  ## The tests that need a GPU, after a minute that says what works
	PYTHON=$(GPU_PYTHON) benchmarks/gpu/session.sh $(GPU_OUT) build smoke tests

bench-gpu:  ## Speed on a GPU by cells of format, share of experts and batch, against other systems
	PYTHON=$(GPU_PYTHON) SHAPE=$(SHAPE) benchmarks/gpu/session.sh $(GPU_OUT) build bench accelerate llama

demo-cut: setup  ## A cut of the demo model in build/demo-cut, under 40 MB: for test-gpu on a machine without network
	$(BIN)/python -m tests.gpu.demo_cut

dry-gpu: setup  ## The GPU's tests and benchmark on their CPU twins, all architectures on the shadow device
	TANDEM_DRY_GPU=1 $(MALLOC) $(BIN)/pytest tests/gpu --deselect tests/gpu/test_kernels.py
	TANDEM_DRY_GPU=1 $(PYTEST) tests/shadow $(wildcard tests/kernels/test_triton*.py) tests/decode/test_cuda_compressed.py tests/disk/test_rows.py
	$(BIN)/python -m benchmarks.gpu --device emulated --layers 2 --vocabulary 512 --formats int4 \
		--shares 0.5 1.0 --batches 1 --prompt-tokens 8 --new-tokens 3

try-disk: setup  ## All architectures with slots in memory for a part of their experts, against all in memory: minutes
	TANDEM_ALL_ON_DISK=1 $(PYTEST) tests/disk

GPU_TESTS := tests/shadow $(wildcard tests/*/test_cuda*.py tests/kernels/test_triton*.py) \
	tests/decode/test_gpu_fusion.py tests/decode/test_graphed_steps.py tests/decode/test_host_embeddings.py \
	tests/experts/test_handed_layers.py tests/hf/test_dense_place.py tests/forecast/test_gpu_check.py
gpu-coverage: setup  ## Which lines and branches of device cuda's host code its tests without a GPU run
	rm -rf build/coverage
	$(MALLOC) $(BIN)/coverage run -m pytest $(SHARED_OUT) $(GPU_TESTS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

# What another Transformers changes does not depend on the kernels. To look for its tests in all files takes longer than most of them.
SEAM = $(if $(ISA),,--isa best) $(shell grep -rl mark.seam tests)
seam-oldest: $(VENV)/transformers-$(OLDEST_TRANSFORMERS)/installed.stamp  ## The seam's tests on the oldest supported Transformers
	PYTHONPATH=$(VENV)/transformers-$(OLDEST_TRANSFORMERS) $(PYTEST) -m "seam and not slow" $(SEAM)

# NEWEST_TORCH: as pip takes it; the index's own torch may bring gigabytes of CUDA.
NEWEST_TORCH ?= $(TORCH)
seam-newest: setup  ## The seam's tests on the newest Transformers that the index has, and NEWEST_TORCH: fails on lost fusions, padded models, more calls a step
	rm -rf $(VENV)/newest
	$(BIN)/pip install --disable-pip-version-check -q --target $(VENV)/newest transformers $(if $(filter-out $(TORCH),$(NEWEST_TORCH)),$(NEWEST_TORCH))
	PYTHONPATH=$(VENV)/newest $(PYTEST) -m seam $(SEAM) -W "ignore:.*is newer than:UserWarning"

docs-models: setup  ## Write docs/models.md again
	$(BIN)/pytest tests/hf/test_architectures.py --write-docs

docs-modules: setup  ## Write docs/modules.md, the table of modules, again
	$(BIN)/pytest tests/test_documents.py -k table_of_modules --write-docs

docs-datapoints: setup  ## Write the table of docs/datapoints/README.md again
	$(BIN)/python -m benchmarks.datapoints

docs-forecast: setup  ## Write docs/gpu-forecast.md: what tandem plan says of common PCs (minutes)
	$(BIN)/python -m benchmarks.policy.gpu_forecast

# pdoc warns of what it cannot resolve: names that exist for type checkers only.
api-docs: setup  ## The API reference from the docstrings, HTML in build/api
	$(BIN)/python -W ignore -m tests.api_reference build/api

# MkDocs refuses a link or an anchor that leads nowhere (not with --quiet), tests/site.py what is loaded from other hosts.
docs: api-docs  ## The site of docs/ in build/site, with the API reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

try-clients: setup  ## Other projects' clients, each installed on its own; writes docs/clients.md
	$(BIN)/python -m tests.clients --write-docs

try-hostile: setup  ## 200 hostile clients beside one stream for ten minutes: gaps, statuses, memory
	$(BIN)/python -m benchmarks.server.hostile --minutes 10

# Without torch's local version ("+cpu"), so that any build of it is taken.
lock: setup  ## Write requirements-dev.lock: what this environment has of Tandem's and its tools' dependencies
	@{ echo "# Versions with which Tandem is developed, for pip's -c or PIP_CONSTRAINT. Written by \`make lock\`."; \
	$(BIN)/pip list --disable-pip-version-check --format=freeze --exclude-editable --exclude pip --exclude setuptools \
		| sed 's/+.*//'; } >requirements-dev.lock

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(FORMAT_CHANGED) --force || true  # 1: it has changed lines

clean:
	rm -rf $(VENV) build

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) found; install Python 3.11 to 3.13 or name one: make PYTHON=python3.12" >&2; exit 2; }
	@command -v $${CXX:-c++} >/dev/null || { echo "make: no C++ compiler found; Tandem's native part needs g++ 11 or clang 14 or newer (Debian, Ubuntu: apt install g++); make wheel needs none" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/runtime.stamp: $(BIN)/python $(SOURCES)
	@echo "Installing torch and Tandem, and building its native part (first time: two minutes)"
	@$(BIN)/python wheels/develop.py demo "$(TORCH)"
	@touch $@

$(VENV)/dev.stamp: $(BIN)/python $(SOURCES)
	@echo "Installing torch and Tandem with its development tools (first time: two minutes)"
	@$(BIN)/python wheels/develop.py dev "$(TORCH)" TANDEM_WARNINGS_ARE_ERRORS=ON
	@touch $@ $(VENV)/runtime.stamp

$(VENV)/transformers-$(OLDEST_TRANSFORMERS)/installed.stamp: $(VENV)/dev.stamp
	@$(BIN)/pip install --disable-pip-version-check -q --upgrade --target $(@D) transformers==$(OLDEST_TRANSFORMERS)
	@touch $@
