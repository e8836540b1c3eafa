# Needs Python 3.11+ with pip, make and a package index. Paths are relative and nothing is run by
# its console script, so that the checkout may lie in a path with spaces in it.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; \
	done)
python := .venv/bin/python

.PHONY: demo test long quick fuzz lint docs explore mutants bench chaos keys clean

demo: .venv/sample.stamp ## the shop's main job, by four workers at once [ORDERS=file.csv]
	@$(python) sample_app/manage.py demo $(if $(ORDERS),--orders "$(ORDERS)")

test: .venv/dev.stamp ## the gate: every promise, on each database and Django [SHARE= PATIENCE=]
	@$(if $(SHARE),SHARE=$(SHARE)) $(if $(PATIENCE),PATIENCE=$(PATIENCE)) $(python) -m tests.suite

long: .venv/dev.stamp .venv-bench/bench.stamp ## everything in full, about three hours
	@$(python) -m tests.suite long

# What waits for clocks, generates histories, or compiles every question.
SLOW := clocks garbage histories kit_race leases lost_transactions own_row shapes shapes_wanted \
	shapes_windows wrong_flips
quick: .venv/dev.stamp ## style, types and the fast part of the contract, in a few minutes
	@$(python) -m tests.suite lint
	@$(python) -m pytest -q tests/contract $(SLOW:%=--ignore=tests/contract/test_%.py)

FUZZ ?= 1000
fuzz: .venv/dev.stamp ## generated questions and flips, other ones each time [FUZZ=examples FUZZ_SEED=]
	@FUZZ=$(FUZZ) $(python) -m pytest tests/fuzz -k generated -s

lint docs: .venv/dev.stamp ## one stage of the tests
	@$(python) -m tests.suite $@

explore: .venv/dev.stamp ## every schedule of two workers, and random ones of three [SECONDS= EXPLORE=]
	@SECONDS=$(or $(SECONDS),300) $(if $(EXPLORE),EXPLORE=$(EXPLORE)) \
		$(python) -m pytest -qs tests/explorer $(if $(EXPLORE),-k written)

mutants: .venv/dev.stamp ## every fault of the list, each of which a test has to find [ONLY= SAMPLE= MUTANTS_SEED=]
	@$(python) -m tests.mutants $(if $(ONLY),--only "$(ONLY)") $(if $(SAMPLE),--sample $(SAMPLE)) \
		$(if $(MUTANTS_SEED),--seed "$(MUTANTS_SEED)")

bench: .venv-bench/bench.stamp ## speeds side by side [ROWS= ROUNDS= ONLY= WORKERS= FSYNC= JSON= DOCS=]
	@.venv-bench/bin/python -m tests.benchmarks $(if $(ROWS),--rows $(ROWS)) \
		$(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(ONLY),--only $(ONLY)) \
		$(if $(WORKERS),--workers $(WORKERS)) $(if $(FSYNC),--fsync $(FSYNC)) \
		$(if $(JSON),--json "$(JSON)") $(if $(DOCS),--docs "$(DOCS)")

chaos: .venv/dev.stamp ## workers and a monkey, at most twelve minutes each [SEED= ROWS= MODEL= ONLY= JSON=]
	@$(python) -m tests.chaos $(if $(SEED),--seed $(SEED)) $(if $(ROWS),--rows $(ROWS)) \
		$(if $(MODEL),--model $(MODEL)) $(if $(ONLY),--only $(ONLY)) $(if $(JSON),--json "$(JSON)")

keys: .venv/dev.stamp ## random runs over groups, and 4,000 orders of their statements [SEEDS=]
	@WHOLE=1 SEEDS=$(or $(SEEDS),1000) $(python) -m pytest -q tests/keys tests/keyed

clean: ## back to a fresh checkout, without the embedded PostgreSQL's data
	@if [ -e .venv/sample.stamp -o -e .venv/dev.stamp ]; then $(python) -m sample_app.embedded remove; fi
	rm -rf .venv .venv-django* .venv-bench build dist docs/_build .hypothesis .mypy_cache .pytest_cache .ruff_cache

# Debian's Python may lack ensurepip; its pip can put one into the environment.
.venv/made.stamp .venv-bench/made.stamp:
	@[ -n "$(PYTHON)" ] || { echo "Expected Python 3.11 or newer with its venv module, got none:" \
		"install it, or name it with PYTHON=…"; exit 1; }
	@echo "Making $(@D) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(@D) >/dev/null || { $(PYTHON) -m venv --without-pip $(@D) \
		&& $(PYTHON) -m pip --python $(@D)/bin/python install --quiet pip; }
	@touch $@

.venv/%.stamp: pyproject.toml .venv/made.stamp
	$(install)

# What is compared with may want other versions of what the tests need.
.venv-bench/%.stamp: pyproject.toml .venv-bench/made.stamp
	$(install)

define install
@echo "Installing what '$*' needs into $(@D)"
@mkdir -p build; for try in 1 2 3; do \
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]" \
		>build/pip.log 2>&1 && exit 0; sleep 5; done; \
	cat build/pip.log; echo "PREPARE FAILED (network): pip could not install '$*'"; exit 1
@touch $@
endef
