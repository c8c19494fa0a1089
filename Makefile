# `make demo` trains a small model in .venv-demo, `make test` runs the suite in .venv; each uses a GPU if there is one.
# With an interpreter that already has everything, skip the set-up: `make test PY=python3`.

PYTHON ?= python3
VENV := .venv
PY ?= $(VENV)/bin/python
DEMO := .venv-demo
OLDEST := .venv-oldest
NEWEST := .venv-newest
ON_MODELS := tests/scoring tests/loss tests/model tests/integrations
DEMO_PY := $(PY)
ifeq ($(PY),$(VENV)/bin/python)
SETUP := $(VENV)/installed
ifeq ($(wildcard $(SETUP)),) # else the demo runs in the environment that is there
DEMO_SETUP := $(DEMO)/installed
DEMO_PY := $(DEMO)/bin/python
endif
endif

.PHONY: demo test test-oldest test-newest quick soak lint docs gpu bench dist clean

demo: $(DEMO_SETUP)
	@echo "Training the small model of the checkout for 40 steps on generated word problems, with credit by prefix_gain_positive."
	@echo "The run ends with the path of its page."
	$(DEMO_PY) -m trainer --credit prefix_gain_positive

# Files in their order: those with the fewest tests, which would come last, are among the longest.
test: $(SETUP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# With the oldest Triton and transformers that setup.py allows: kernels are built, scoring, losses, the self-check and
# the hosts that are installed are run. What needs a newer transformers is skipped by name.
test-oldest: $(OLDEST)/installed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 --dist loadfile tests/ops $(ON_MODELS)

# The same with the newest packages of the index, without constraints.txt; set up anew each time.
test-newest:
	$(call SET_UP,$(NEWEST),--upgrade)
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -n 2 --dist loadfile tests/ops $(ON_MODELS) tests/trainer/rollouts

quick: $(SETUP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

# 2,000 tiny steps, once undisturbed and once killed twenty times: some minutes.
soak: $(SETUP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -s tests/trainer/soak.py

lint: $(SETUP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'
	$(PY) .ci/limits.py

# The pages as a site in site/; a link or an anchor that leads nowhere is an error.
docs: $(SETUP)
	$(PY) -m mkdocs build --strict

gpu: $(SETUP)
	$(PY) -m pytest -n 12 --dist worksteal
	$(PY) -m benchmarks

bench: $(SETUP)
	$(PY) -m benchmarks --device cpu

# The sdist and the wheel that is built from it, their metadata, and a step of each in an empty environment with its
# packages, which are gigabytes. TORCH=torch==2.11.0 takes the oldest torch in place of the newest.
TORCH := torch
dist:
	rm -rf dist
	$(PYTHON) -m venv dist/empty
	dist/empty/bin/python -m pip install --quiet build twine
	dist/empty/bin/python -m build
	dist/empty/bin/python -m twine check --strict dist/*.tar.gz dist/*.whl
	set -e; for file in dist/*.tar.gz dist/*.whl; do \
	  $(PYTHON) -m venv --clear dist/empty; cd dist/empty; \
	  bin/python -m pip install --quiet $(TORCH) "../../$$file[trainer]"; \
	  bin/cfa-train --version; bin/cfa-train --max_steps 1 --eval_problems 4 --output_dir run; \
	  bin/cfa-analyze run; bin/cfa-compare run; cd ../..; \
	done

define NEW_ENVIRONMENT
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "Python 3.11 or newer is needed, $(PYTHON) is `$(PYTHON) --version`; try make PYTHON=python3.11"; exit 1; }
$(PYTHON) -m venv $(1)
endef

define SET_UP
$(call NEW_ENVIRONMENT,$(1))
$(1)/bin/python -m pip install --quiet --upgrade pip
$(1)/bin/python -m pip install --quiet $(2) torch
$(1)/bin/python -m pip install --quiet $(2) -e '.[test,lint,docs]'
endef

$(VENV)/installed: setup.py constraints.txt
	$(call SET_UP,$(VENV),-c constraints.txt)
	touch $@

# No linters, tests or site builders: torch, Triton and what the training program imports.
$(DEMO)/installed: setup.py constraints.txt
	@echo "Setting up $(DEMO), once: torch, and 1.6 GB of other packages, of which Triton is 0.7 GB."
	$(call NEW_ENVIRONMENT,$(DEMO))
	$(DEMO)/bin/python -m pip install -c constraints.txt torch
	$(DEMO)/bin/python -m pip install -c constraints.txt -e '.[trainer]'
	touch $@

$(OLDEST)/installed: setup.py constraints.txt constraints-oldest.txt
	$(call SET_UP,$(OLDEST),-c constraints.txt)
	$(OLDEST)/bin/python -m pip install --quiet --no-deps -r constraints-oldest.txt
	touch $@

clean:
	rm -rf $(VENV) $(DEMO) $(OLDEST) $(NEWEST) build site *.egg-info .pytest_cache .ruff_cache .mypy_cache
