# `make demo` trains a small model, `make test` runs the suite; each sets up .venv first and uses a GPU if there is one.
# With an interpreter that already has everything, skip the set-up: `make test PY=python3`.

PYTHON ?= python3
VENV := .venv
PY ?= $(VENV)/bin/python
ifeq ($(PY),$(VENV)/bin/python)
SETUP := $(VENV)/installed
endif

.PHONY: demo test quick lint gpu bench clean

demo: $(SETUP)
	$(PY) -m trainer

test: $(SETUP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile

quick: $(SETUP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow" -n 2 --dist loadfile

lint: $(SETUP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

gpu: $(SETUP)
	$(PY) -m benchmarks

bench: $(SETUP)
	$(PY) -m benchmarks --device cpu

$(VENV)/installed: setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, $(PYTHON) is `$(PYTHON) --version`; try make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[test,lint]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache
