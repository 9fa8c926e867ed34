# Every command of this project. `make` alone lists them; each one sets up what it needs first, once.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PY := .venv/bin/python
STAMP := .venv/setup.stamp
PORT ?= 8000
PARTS ?=
export OMP_NUM_THREADS := 1

.PHONY: help setup model book serve test execute pdf bench lint clean

help: ## list the targets
	@echo "make setup, then make book. Targets:"
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  Options: PYTHON=python3.11, TORCH_INDEX=<url of a pip index with another build of torch> (setup);"
	@echo "           PORT=8000 (serve); PARTS='lint unit' (test); NB='book/a/b.ipynb' (execute)"

setup: $(STAMP) ## make .venv from constraints.txt, and try to add the small real model
	@tools/setup.sh --model || true

# The stamp names the folder: a .venv does not survive being moved.
ifneq ("$(shell cat $(STAMP) 2>/dev/null)","$(CURDIR)")
.PHONY: $(STAMP)
endif
$(STAMP): constraints.txt pyproject.toml tools/setup.sh
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" tools/setup.sh

model: $(STAMP) ## add the small real model (SmolLM2-135M) that a few pages and tests use
	@tools/setup.sh --model

book: $(STAMP) ## build the book from the stored outputs, warnings as errors
	@$(PY) tools/build_book.py

serve: book ## build the book and serve it on PORT
	@$(PY) tools/serve_book.py $(PORT)

test: $(STAMP) ## run all tests part by part and print the minutes of each
	@$(PY) tools/run_tests.py $(if $(PARTS),--parts $(PARTS))

execute: $(STAMP) ## run the notebooks again and store their outputs, run times and peak memory
	@$(PY) tools/execute_notebooks.py $(NB)

pdf: book ## print the built book with Chromium into _build/pdf/book.pdf
	@$(PY) tools/print_pdf.py

bench: $(STAMP) ## time ratios against baselines on this machine; then a million inputs for the decoders of patches
	@$(PY) -m labs bench
	@$(PY) -m labs.pulse.fuzz --inputs 1000000

lint: $(STAMP) ## format, lint, types and import directions
	@$(PY) tools/run_tests.py --parts lint

clean: ## remove what the other targets built (not .venv, not runs/)
	rm -rf _build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
