# Two commands matter: `make up` runs the whole system, `make test` proves it.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

RUN_STAMP := $(VENV)/.run-installed
DEV_STAMP := $(VENV)/.dev-installed

.PHONY: help up down status test soak mutants bench-dispatch bench-engine bench-gateway bench-ledger bench-usage lint format migrate lock clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

up: $(RUN_STAMP) ## start everything on this machine: services, model, control plane, worker, gateway
	@$(BIN)/python -m cli up $(ARGS)

down: $(RUN_STAMP) ## stop it; data stays in .local/
	@$(BIN)/python -m cli down $(ARGS)

status: $(RUN_STAMP) ## what runs, where, and whether it is ready
	@$(BIN)/python -m cli status $(ARGS)

# The stack's tests mostly wait, so they run in one process beside the others.
test: $(DEV_STAMP) ## every test, on real services and the real model
ifdef ARGS
	@$(BIN)/python -m pytest $(ARGS)
else
	@log=$$(mktemp); \
	$(BIN)/python -m pytest tests/e2e > $$log 2>&1 & stack=$$!; \
	$(BIN)/python -m pytest -n 2 --ignore=tests/e2e --cov --cov-report=term; rest=$$?; \
	wait $$stack; stack=$$?; cat $$log; rm -f $$log; \
	exit $$((rest || stack))
endif

mutants: $(DEV_STAMP) ## change the rules of money and KV one by one: which changes does no test notice?
	@$(BIN)/python -m tests.support.mutants $(ARGS)

bench-engine: $(DEV_STAMP) ## output tokens/s, TTFT and ITL of our worker beside transformers
	@$(BIN)/python -m benchmarks.engine $(ARGS)

bench-gateway: $(DEV_STAMP) ## what the gateway adds to an engine that answers at once, governed and not
	@$(BIN)/python -m benchmarks.gateway $(ARGS)

bench-dispatch: $(DEV_STAMP) ## arm and finish per second through one Valkey's real functions
	@$(BIN)/python -m benchmarks.dispatch $(ARGS)

bench-ledger: $(DEV_STAMP) ## reserve+settle pairs/s beside one statement each, on a Postgres of its own
	@$(BIN)/python -m benchmarks.ledger $(ARGS)

bench-usage: $(DEV_STAMP) ## questions about 10 million requests, and what they cost the token path
	@$(BIN)/python -m benchmarks.usage_queries $(ARGS)

soak: $(DEV_STAMP) ## kill gateways, workers and Postgres 1,000 times, the real worker 20, then press the engine for 20 minutes
	@$(BIN)/python -m tests.soak
	@$(BIN)/python -m tests.soak.replicas
	@$(BIN)/python -m tests.soak.engine
	@INVARIANCE_CASES=$${INVARIANCE_CASES:-2000} $(BIN)/python -m pytest -q --timeout=3600 \
		tests/engine/test_invariance.py
	@SCHEMAS=$${SCHEMAS:-200} $(BIN)/python -m pytest -q --timeout=3600 tests/engine/test_schemas.py
	@SOAK_SCHEDULER=$${SOAK_SCHEDULER:-5000} $(BIN)/python -m pytest -q --timeout=3600 \
		tests/unit/worker/test_scheduler_machine.py
	@SOAK_INVARIANTS=$${SOAK_INVARIANTS:-60} $(BIN)/python -m pytest -q --timeout=3600 \
		tests/store/ledger/test_invariants.py
	@SOAK_FAIRNESS=$${SOAK_FAIRNESS:-10000} $(BIN)/python -m pytest -q --timeout=3600 \
		tests/unit/core/test_dispatch_fairness.py
	@SOAK_PRESSURE=$${SOAK_PRESSURE:-60} $(BIN)/python -m pytest -q --timeout=3600 \
		tests/simulation/test_overload.py
	@SOAK_DESCRIPTION=$${SOAK_DESCRIPTION:-50} $(BIN)/python -m pytest -q \
		tests/store/control_plane/test_description.py
	@$(BIN)/python -m tests.soak.overload
	@$(BIN)/python -m tests.soak.drain
	@$(BIN)/python -m tests.soak.fairness
	@SOAK_LIMITS=$${SOAK_LIMITS:-1000} $(BIN)/python -m pytest -q --timeout=3600 \
		tests/store/dispatch/test_limit_twins.py

lint: $(DEV_STAMP) ## style, types, import contracts, spelling
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check --no-cache .
	@$(BIN)/mypy .
	@PYTHONPATH=. $(BIN)/lint-imports
	@$(BIN)/typos

format: $(DEV_STAMP) ## rewrite to the house style
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

migrate: $(RUN_STAMP) ## bring the database in DATABASE_URL up to date
	@$(BIN)/alembic upgrade head

lock: ## pin what pyproject.toml asks for into requirements/*.lock
	@requirements/lock.sh $(PYTHON)

clean: ## remove the environment and caches; data in .local/ stays
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, and '$(PYTHON)' is not: make PYTHON=python3.11 …" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# pip answers "already satisfied" in a second, so a changed lock costs little.
$(RUN_STAMP): requirements/base.lock requirements/local.lock requirements/worker.lock | $(VENV)/bin/python
	@echo "installing dependencies into $(VENV)"
	@$(PIP) install -r requirements/local.lock -r requirements/worker.lock
	@touch $@

$(DEV_STAMP): requirements/dev.lock $(RUN_STAMP)
	@$(PIP) install -r requirements/dev.lock
	@command -v chromium > /dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && \
		echo "installing chromium, for the console's tests" && apt-get update -qq && \
		apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core > /dev/null; } || \
		echo "no chromium: the console's tests will say so" >&2
	@touch $@
