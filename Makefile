# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_RESULTS ?= demo-results

.PHONY: setup demo test lint test-without-torch clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Meshwright needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,lint]'
	touch $@

demo: setup
	$(BIN)/meshwright demo --out $(DEMO_RESULTS)

# what needs one process is spread over the cores; what starts several ranks has the machine to itself
test: setup
	$(BIN)/python -m pytest -n auto --dist loadfile tests/unit
	$(BIN)/python -m pytest --ignore=tests/unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# planner and cost_models where torch is not installed
test-without-torch: .venv-without-torch/.installed
	.venv-without-torch/bin/python -m pytest -n auto --dist loadfile tests/unit

.venv-without-torch/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-without-torch
	.venv-without-torch/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		highspy hypothesis jsonschema matplotlib networkx numpy pulp pyyaml pytest pytest-timeout pytest-xdist
	touch $@

clean:
	rm -rf $(VENV) .venv-without-torch $(DEMO_RESULTS) build *.egg-info .mypy_cache .ruff_cache
