# Every target sets the environment up by itself; `python3 -m helpers` does the same without make.
PYTHON ?= python3
NB ?=
HELPERS = @command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not on PATH; the course needs Python 3.11, 3.12 or 3.13. Name one that exists: make run PYTHON=python3.12" >&2; exit 3; }; $(PYTHON) -m helpers

.PHONY: run test lab notebooks bench report doctor clean
.DEFAULT_GOAL := run

run: ; $(HELPERS) run $(NB)
test: ; $(HELPERS) test
lab: ; $(HELPERS) lab
notebooks: ; $(HELPERS) build $(NB)
bench: ; $(HELPERS) bench client
report: ; $(HELPERS) report
doctor: ; $(HELPERS) doctor
clean: ; rm -rf build .venv .toolboxes .pytest_cache .mypy_cache .ruff_cache .hypothesis
