# `make demo` and `make test` do everything from a bare Python 3.10+; set PYTHON to choose the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test coverage fuzz lint docs notebook clean

demo: $(INSTALLED)
	$(BIN)/python recipes/demo/demo.py --out demo_output

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile tests

# Of a part of the suite (tests/conftest.py), which has to reach the floors alone.
coverage: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term:skip-covered --cov-report=json tests
	$(BIN)/python .ci/coverage_floor.py coverage.json

# Damaged adapters; longer by hand: `make fuzz FUZZ_SECONDS=600`.
FUZZ_SECONDS ?= 60
fuzz: $(INSTALLED)
	$(BIN)/python tests/fuzz_adapter.py --seconds $(FUZZ_SECONDS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The outputs that are committed in the notebooks; warnings and progress bars name the machine.
notebook: $(INSTALLED)
	PYTHONWARNINGS=ignore TQDM_DISABLE=1 $(BIN)/jupyter nbconvert --to notebook --execute --inplace \
	    --ExecutePreprocessor.record_timing=False docs/notebooks/*.ipynb

# torch comes first and pinned: an unpinned one would pull builds of several gigabytes.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) demo_output site
