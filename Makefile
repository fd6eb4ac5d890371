# The two commands of the README are `make serve` and `make test`. Each makes .venv, installs what it
# needs and does its job; a second run installs nothing.

define HELP
make serve     serve the embedded model on this machine (MODEL=DIR: another one)
make test      run the tests
make check     format, lint, types, layers, sizes, spelling
make compile-kernels   compile the Triton operators for all cards, without one (needs triton)
make sanitize  run the Triton operators on a card under compute-sanitizer (TORCH=cuda)
make install   everything a developer needs, in .venv
make clean     remove .venv and .cache

PYTHON=python3.12   interpreter for a new .venv: 3.11 or 3.12 (default: the first one found)
TORCH=cuda          take the torch build that pip finds (default cpu: a pinned, checked CPU build)
ARGS="..."          further options of `headrace serve`, of pytest or of a script
endef
export HELP

TORCH ?= cpu
PYTHON ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
MODEL ?=

.PHONY: help serve test check compile-kernels sanitize install clean
.DELETE_ON_ERROR:

help:
	@echo "$$HELP"

# One stamp per set of extras and torch build; a larger set covers the smaller ones.
COVERED_BY_run := run
COVERED_BY_test := run test
COVERED_BY_dev := run test dev
$(VENV)/.%-$(TORCH): pyproject.toml constraints.txt scripts/install
	@TORCH=$(TORCH) PYTHON=$(PYTHON) scripts/install $(VENV) $*
	@touch $(foreach set,$(COVERED_BY_$*),$(VENV)/.$(set)-$(TORCH))
.PRECIOUS: $(VENV)/.%-$(TORCH)

install: $(VENV)/.dev-$(TORCH)

serve: $(VENV)/.run-$(TORCH)
	@$(BIN)/headrace serve $(MODEL) $(ARGS)

test: $(VENV)/.test-$(TORCH)
	@scripts/test $(ARGS)

check: $(VENV)/.dev-$(TORCH)
	@scripts/check

compile-kernels: $(VENV)/.run-$(TORCH)
	@$(BIN)/python scripts/compile_kernels.py $(ARGS)

sanitize: $(VENV)/.test-$(TORCH)
	@$(BIN)/python scripts/sanitize.py $(ARGS)

clean:
	rm -rf $(VENV) .cache
