# The commands of the README.  Each makes .venv from requirements.txt when it is missing or outdated.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: reproduce test lint clean

reproduce: $(INSTALLED)
	$(BIN)/python -m experiments reproduce

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) results/quick .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	touch $@
