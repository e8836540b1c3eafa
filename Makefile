# Needs Python 3.11+ with pip, make and a package index. Paths are relative and nothing is run by
# its console script, so that the checkout may lie in a path with spaces in it.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; \
	done)
python := .venv/bin/python

.PHONY: demo test lint docs clean

demo: .venv/sample.stamp ## the shop's main job, by four copies at once [ORDERS=file.csv]
	@$(python) sample_app/manage.py demo $(if $(ORDERS),--orders "$(ORDERS)")

test: .venv/dev.stamp ## everything, on every database and Django that can be had here
	@$(python) -m tests.suite

lint docs: .venv/dev.stamp ## one stage of the tests
	@$(python) -m tests.suite $@

clean: ## back to a fresh checkout, without the embedded PostgreSQL's data
	@if [ -e .venv/sample.stamp -o -e .venv/dev.stamp ]; then $(python) -m sample_app.embedded remove; fi
	rm -rf .venv .venv-django* build dist docs/_build .hypothesis .mypy_cache .pytest_cache .ruff_cache

# Debian's Python may lack ensurepip; its pip can put one into the environment.
.venv/made.stamp:
	@[ -n "$(PYTHON)" ] || { echo "Expected Python 3.11 or newer with its venv module, got none:" \
		"install it, or name it with PYTHON=…"; exit 1; }
	@echo "Making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv >/dev/null || { $(PYTHON) -m venv --without-pip .venv \
		&& $(PYTHON) -m pip --python $(python) install --quiet pip; }
	@touch $@

.venv/%.stamp: pyproject.toml .venv/made.stamp
	@echo "Installing what '$*' needs into .venv"
	@$(python) -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	@touch $@
