# make quickstart: from nothing to a small language model, on any machine.   make help: the rest.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
RUN := $(VENV)/bin/python
export PYTHON

help:
	@echo 'make quickstart   install, make a corpus, train a small model on it, and see what it writes (minutes, no GPU needed)'
	@echo 'make test         install, and run the tests of the code'
	@echo 'make layouts      every architecture on every axis and every layout, against one process, and resumed on another layout'
	@echo 'make tour         whole runs: README, quick starts, notebook, site and benchmarks as a reader runs them, and kills and hangs'
	@echo 'make hosts        every way to start ranks on several hosts, for real: namespaces with their own sshd and Slurm (needs root)'
	@echo 'make test-slow    more than make test has: the rest of the matrix of layouts, kill loops, more runners (an hour)'
	@echo 'make test-fast    one case of every test that takes well under a second: what to run while you work (2 minutes)'
	@echo 'make numerics     the tests of numbers again, as a processor with fewer instructions computes them'
	@echo 'make gpu-host     kernels, waits, copies and messages of steps on a GPU that computes nothing (torch with CUDA, no GPU)'
	@echo 'make torch TORCH=2.14.1   the quick start and a part of the layouts, with another version of torch'
	@echo 'make durations    the whole suite, and tests/durations.json, from which order and choice of tests follow'
	@echo 'make bench        measure speed and memory next to other programs, and write the tables of docs/benchmarks.md'
	@echo 'make package      build wheel and sdist, and try them outside of the repository'
	@echo 'make site         the documentation as a site, in build/site'
	@echo 'make lint         check the source: mistakes and format (ruff), types (mypy), English (docs/style.md)'
	@echo 'make docs         write the generated pages of docs/ again'
	@echo 'make venv         only install, into $(VENV)'
	@echo 'Variables: PYTHON=python3.12 makes the environment with another interpreter, VENV=folder elsewhere.'
	@echo '           JOBS=4 runs four files of tests side by side (distributed ones have up to eight processes each).'

quickstart: venv
	@$(RUN) tools/quickstart.py $(if $(MODEL),--model $(MODEL))

venv:
	@requirements/install all $(VENV)

dev:
	@requirements/install dev $(VENV)
	@requirements/install docs $(VENV)

PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(if $(UNTIL),--until $(UNTIL))

# Files that have a mark: to import all of them takes each process a quarter of a minute.
MARKED = $(shell grep -rlE '$(1)' tests --include='test_*.py')

test: dev
	$(PYTEST)

# After a change of the model, the engine or what is parallel: each layout against one process of plain PyTorch.
layouts: dev
	$(PYTEST) -m 'layouts and not slow' $(call MARKED,mark\.layouts|toured)

# Whole runs. The commands of the documentation: installed commands, the README on one host and on several, the site. And
# runs that are killed, hang, spike or resume, of which `make test` has one of each sort or their parts.
tour: dev
	$(PYTEST) -m 'tour and not slow' $(call MARKED,mark\.tour|toured)

# Skipped, with the reason, without root and the programs that tests/launch/debian-packages lists.
hosts: dev
	$(PYTEST) -m 'hosts and not slow' $(call MARKED,mark\.hosts)

# Before a release, and after a change of what those tests are about.
test-slow: dev
	$(PYTEST) -m slow

test-fast: dev
	$(PYTEST) --fast

# Sums come out in another order: what holds on one make of processor must hold on others.
NARROW := $(shell grep -qw avx512f /proc/cpuinfo 2>/dev/null \
	&& echo ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
	|| echo ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41)
# Files that count bytes, messages, parameters or processes compute the same with fewer instructions.
COUNTING := traffic process_groups told_phases device_placement kernel_counts describe configs counts start. traps account timing watched timeouts hangs
# MKL's kernels for AVX2 on Intel's processors give a row other bits beside other rows. And oneDNN, held to AVX2, refuses
# 8-bit products in some processes there. With all instructions these files pass.
AMX := $(shell grep -qw amx_bf16 /proc/cpuinfo 2>/dev/null && echo fetched staying eight_bits)
NUMERICAL := $(patsubst %,--ignore-glob='*/test_*%*',$(COUNTING) $(AMX)) $(wildcard tests/features/adapters tests/features/multi_token tests/kinds tests/model tests/objectives tests/parallel) tests/engine tests/evaluation tests/fuzz \
	$(wildcard tests/training/layouts/test_layouts*.py)

# Inductor's code for all instructions gives nan where torch uses fewer, so these runs have a cache of their own.
# The cases of a test have one bound and one code, and all of them run with all instructions: every third is enough here.
SAMPLE ?= 3
numerics: dev
	$(NARROW) TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/build/inductor-narrow $(PYTEST) --sample $(SAMPLE) -m 'not slow and not tour and not hosts' $(NUMERICAL)

durations: dev
	$(PYTEST) -m 'not slow' --store-durations

# Where $(VENV) has torch's CUDA build, and the machine no GPU: what a step asks of one (tests/stand_ins/gpu).
gpu-host: dev
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 0 tests/training/test_gpu_host.py tests/engine/deepspeed/test_one_pass.py
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(RUN) -m pytest -n 0 tests/kinds/test_kernels_in_values.py tests/engine/deepspeed/test_one_pass.py

# Another version of torch, in an environment of its own. requirements/base.txt has the range that the wheel asks for.
OTHER := build/torch-$(TORCH)
torch:
	@test -n "$(TORCH)" || { echo 'give the version: make torch TORCH=2.14.1'; exit 2; }
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet torch==$(TORCH)
	requirements/beside_torch dev $(OTHER)/bin/python
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest -m '' tests/test_quickstart.py tests/training/layouts/test_layouts_dense.py

package: dev
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m '' tests/test_package.py

# The package and what renders pages, without the packages of the tests.
site: venv
	@requirements/install docs $(VENV)
	$(RUN) -m sphinx -c docs --fail-on-warning --keep-going --quiet --jobs auto . build/site

lint: dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m pytest -q -p no:cacheprovider tests/test_style.py

# Rows that are there already are kept: an interrupted run continues. BENCH='--only start data', '--clock wall', '--fresh', ...
PEERS := $(CURDIR)/build/peers
bench: dev $(PEERS)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=$(PEERS):$(CURDIR) $(RUN) -m bench page $(BENCH)

$(PEERS)/.installed: bench/peers.txt
	$(RUN) -m pip install --quiet --upgrade --no-deps --target $(PEERS) --requirement $<
	touch $@

docs: dev
	$(RUN) tools/config.py docs

.PHONY: help quickstart venv dev test layouts tour hosts test-slow test-fast numerics torch durations gpu-host bench package site lint docs
