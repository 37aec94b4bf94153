# Two commands, each alone on a fresh machine: `make demo` and `make test`. PYTHON= chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= configs/demo.yaml

.PHONY: demo test lint format setup clean

setup: $(VENV)/.ready

# quick when nothing has changed: the stamp is newer than what the environment is made from
$(VENV)/.ready: pyproject.toml docker/install.sh
	@PYTHON=$(PYTHON) sh docker/install.sh $(VENV)

demo: setup
	$(BIN)/accredit train $(CONFIG) name=demo-$$(date +%Y%m%d-%H%M%S) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: lint
	$(BIN)/python -m pytest $(ARGS)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs build *.egg-info
