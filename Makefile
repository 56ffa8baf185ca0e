# Every target sets itself up: the first one run on a fresh machine makes .venv and fills it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := $(or $(wildcard $(STAMP)),$(VENV)/.demo)  # the full environment if it exists, else what the demo and its server need

.PHONY: demo serve-demo test test-ci slow attack notebooks docs lint release format clean

# Beside what the demo installed pip searches for a very long time: the whole list goes into an empty environment.
$(STAMP): pyproject.toml constraints.txt
	test ! -e $(VENV)/.demo || rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[serve,data]'
	touch $@

demo: $(DEMO)
	$(BIN)/hydra-ensembles demo

# The page is at http://127.0.0.1:8000; the demo runs first if it has not yet.
serve-demo: $(DEMO)
	test -f hydra-demo/model/config.json || $(BIN)/hydra-ensembles demo
	$(BIN)/hydra-ensembles serve hydra-demo/model --name eurosat-hydra

# One worker per core, one thread each; a test file stays on one worker, and so do files that share long fixtures.
# Bytecode is cached even if the environment says otherwise: subprocesses of tests would compile everything again.
# Tests read files as UTF-8 in every locale.
test: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONUTF8=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# What CI runs besides: studies, samples of the attack, examples of documents, notebooks, the site.
test-ci: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONUTF8=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m ci -n auto --dist loadfile --no-loadscope-reorder

slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

# Damaged files, bad inputs, altered models, killed processes, threads; a tenth of the samples, all with ATTACK=full.
# Writes results/tables/attack.csv, and fails on any forbidden outcome.
attack: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m attack

# Runs the notebooks.
notebooks: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python notebooks/execute.py

# The site goes to site/; strict: a warning is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Builds sdist and wheel of the last commit, and tries the wheel in empty environments, with no extra and with each.
release:
	$(PYTHON) .ci/release.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build site
