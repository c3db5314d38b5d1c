# make quickstart: from nothing to a small language model, on any machine.   make help: the rest.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
RUN := $(VENV)/bin/python
export PYTHON

help:
	@echo 'make quickstart   install, make a corpus, train a small model on it, and see what it writes (minutes, no GPU needed)'
	@echo 'make test         install, and run the whole test suite'
	@echo 'make lint         check the source: mistakes and format (ruff)'
	@echo 'make docs         write the generated pages of docs/ again'
	@echo 'make venv         only install, into $(VENV)'
	@echo 'Variables: PYTHON=python3.12 makes the environment with another interpreter, VENV=folder elsewhere;'
	@echo '           JOBS=4 runs four files of tests side by side (distributed ones have up to eight processes each).'

quickstart: venv
	@$(RUN) tools/quickstart.py $(if $(MODEL),--model $(MODEL))

venv:
	@requirements/install base $(VENV)

dev:
	@requirements/install dev $(VENV)

test: dev
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(JOBS) --dist loadfile

lint: dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

docs: dev
	$(RUN) tools/config.py docs

.PHONY: help quickstart venv dev test lint docs
