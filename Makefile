# The two commands of this project are `make demo` and `make test`; `make help` lists the others.
PYTHON ?= python3
VENV := .venv
LOADERS := build/loaders
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# As many workers as tests/conftest.py says. `make test PARALLEL=` runs one test after the other.
PARALLEL ?= --numprocesses auto --dist loadfile --no-loadscope-reorder
RECIPE := pyproject.toml constraints.txt tests/peers.txt

# Tests start some thousand processes: without bytecode files, each compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-slow test-loaders check docs examples format bench clean

help:
	@echo "make demo       a tour of this machine's storage, about a minute; leaves build/demo/report.html"
	@echo "make test       install all the tests need and run them"
	@echo "make test-slow  the long sweeps, and many examples of each property"
	@echo "make test-loaders  the loaders of seven other libraries, in an environment of their own (3 GB)"
	@echo "make check      formatting, lint, types, import rules, structure"
	@echo "make docs       build the site of docs/ into build/site, and follow every link in it"
	@echo "make examples   run every block of README and docs, and the programs of examples/"
	@echo "make bench      speed beside peers and the raw limit, against the records in benchmarks/records"
	@echo "make format     let ruff rewrite what it can"
	@echo "make clean      remove .venv and build"

demo: $(VENV)/.holds-demo
	$(BIN)/penstock demo --out build/demo

test: $(VENV)/.holds-all
	@bash scripts/components.sh
	$(BIN)/python -m pytest -m "not slow and not examples" $(PARALLEL)

test-slow: $(VENV)/.holds-all
	@bash scripts/components.sh
	$(BIN)/python -m pytest -m "slow or hypothesis" --hypothesis-profile=thorough --timeout=3600

# Their libraries ask for other versions than constraints.txt has.
test-loaders: $(LOADERS)/.holds-loaders
	$(LOADERS)/bin/python -m pytest -rs tests/integration/bench/own_loader/test_loaders_of_others.py

check: $(VENV)/.holds-all
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/structure.py

docs: $(VENV)/.holds-all
	PYTHONPATH=. $(BIN)/python scripts/json_schemas.py
	$(BIN)/python scripts/docs_site.py

examples: $(VENV)/.holds-all
	$(BIN)/python -m pytest -m examples $(PARALLEL)

format: $(VENV)/.holds-all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.holds-all
	@bash scripts/components.sh
	$(BIN)/python benchmarks/run.py

$(LOADERS)/.holds-loaders: pyproject.toml
	@echo "Installing the loaders of other libraries into $(LOADERS) (3 GB) ..."
	@$(PYTHON) -m venv $(LOADERS)
	@$(LOADERS)/bin/python -m pip --disable-pip-version-check --quiet install --editable '.[loaders]'
	@touch $@

clean:
	rm -rf $(VENV) build

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "penstock needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version`." \
	       "Point at another: make PYTHON=python3.12 ..." >&2; exit 3; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "Python's venv module is missing. On Debian and Ubuntu: apt-get install python3-venv" >&2; \
	  rm -rf $(VENV); exit 3; }

# A stamp says what .venv holds; a changed recipe installs again. `holds-all` contains `holds-demo`.
$(VENV)/.holds-demo: $(RECIPE) | $(BIN)/python
	@test -e $(VENV)/.holds-all -a $(VENV)/.holds-all -nt pyproject.toml -a $(VENV)/.holds-all -nt constraints.txt || { \
	  echo "Installing penstock into $(VENV) ..."; \
	  $(PIP) install --constraint constraints.txt --editable '.[bench]'; }
	@touch $@

$(VENV)/.holds-all: $(RECIPE) | $(BIN)/python
	@echo "Installing penstock with all extras and the test tools into $(VENV) (a few minutes the first time) ..."
	@$(PIP) install --constraint constraints.txt --editable '.[test]'
	@$(PIP) install --no-deps --requirement tests/peers.txt || \
	  echo "Not all of tests/peers.txt can be installed here: the tests of their adapters will be skipped." >&2
	@touch $@ $(VENV)/.holds-demo
