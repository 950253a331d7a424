# Two commands do everything on a fresh machine, each in a virtual environment of its own making.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
PURELIB := import sysconfig; print(sysconfig.get_path('purelib'))

# Where the loop meets transformers (its attention, cache and `generate`): run on its oldest version too.
MEETING := tests/decoding/test_loop.py tests/methods/test_hf_generate.py -k "generate or architecture or recomputation"
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

.PHONY: run test lint slow schemas clean

run: $(INSTALLED)  ## the embedded demonstration: all arms, then the path of its page
	$(BIN)/mtbench run --limit 300

# The tests' models are so small that a second thread would only make the first one wait.
test slow: export OMP_NUM_THREADS = 1

test: lint .venv-oldest/installed  ## lint, types, tests; the loop's tests on the oldest transformers too
	$(BIN)/pytest $(PARALLEL)
	.venv-oldest/bin/python -m pytest $(PARALLEL) $(MEETING)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

slow: $(INSTALLED)  ## the checks that take minutes
	$(BIN)/pytest -m slow

schemas: $(INSTALLED)  ## write the JSON Schemas of what is stored, from the records
	$(BIN)/python -m mtbench.cli.schemas

# torch goes first and exactly as pinned: an open range may bring gigabytes of GPU libraries.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e . --group dev
	touch $@

# The oldest transformers we promise needs an older huggingface-hub, so it gets an environment that borrows torch.
.venv-oldest/installed: constraints-oldest.txt $(INSTALLED)
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install -q -c constraints-oldest.txt transformers
	.venv-oldest/bin/pip install -q --no-deps -e .
	$(BIN)/python -c "$(PURELIB)" > "$$(.venv-oldest/bin/python -c "$(PURELIB)")/borrowed.pth"
	touch $@

clean:
	rm -rf .venv .venv-oldest build dist *.egg-info
