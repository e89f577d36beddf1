# make demo: the main job on a real model.   make test: everything the tests need, and the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CACHE ?= $(HOME)/.cache/overspill
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
# Without a GPU torch's CPU build is enough; constraints.txt pins it. With one, whatever torch the range allows.
CONSTRAINTS := $(if $(GPU),,-c constraints.txt)
DEMO_DEVICE := $(if $(GPU),--device cuda,--device emulated --device-memory 400MiB --link-bandwidth 4GB/s)

.PHONY: demo test check sanitize support bench soak clean

$(VENV)/installed: pyproject.toml constraints.txt CMakeLists.txt $(wildcard kernels/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[test,check,bench]'
	touch $@

demo: $(VENV)/installed
	model=$$($(BIN)/python examples/demo_model.py --cache $(CACHE)) && \
	$(BIN)/overspill compare "$$model" $(DEMO_DEVICE) --cpu-offload-gb 0.3 \
		--prompt "What is the capital of France?" --prompt "Name three colours." \
		--max-tokens 24 --output report && \
	OVERSPILL_CACHE_DIR=$(CACHE)/converted $(BIN)/python examples/under_a_limit.py "$$model"

test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 -q

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The kernels over ragged shapes, under the address and undefined-behaviour sanitizers.
sanitize: $(VENV)/installed
	$(BIN)/cmake -S . -B build/sanitize -DOVERSPILL_SANITIZE=ON
	$(BIN)/cmake --build build/sanitize --parallel 2
	build/sanitize/check

# Runs every architecture and writes the support matrix, which the tests hold against what they find.
support: $(VENV)/installed
	$(BIN)/python tests/support/write.py

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks

# 200 clients at once for five minutes against a real server; writes docs/measurements/soak-<date>.
soak: $(VENV)/installed
	$(BIN)/python benchmarks/soak.py --cache $(CACHE)

clean:
	rm -rf $(VENV) build report
