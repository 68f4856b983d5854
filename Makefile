# `make study` and `make test` set everything up by themselves; PYTHON picks the interpreter.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
SUBJECTS := .venv-subjects
RUN := $(VENV)/bin/python
PYTEST := -m pytest -n auto --maxprocesses 8 --dist worksteal
# Bytecode is written of what is imported, by whoever imports it first: to compile all 18,000 files
# that are installed takes longer than to install them. An old pip takes twice as long.
unexport PYTHONDONTWRITEBYTECODE
PIP := -m pip install --quiet --disable-pip-version-check --no-compile
IMPORT := -c "import hooks_impl, patch_impl, experiments.testbed.recipes"
ifneq ($(filter test check,$(MAKECMDGOALS)),)
# An install, or a run that starts or ends, keeps one core busy: another uses the other. What each
# prints comes at its end, where make can see to that, and does not mix.
MAKEFLAGS += -j2 $(addprefix --,$(filter output-sync,$(.FEATURES)))
endif
MKDOCS := NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs

# The other implementation of the presses, in a process of its own: importing it rewrites
# transformers' attention registry.
ORACLE := $(OLDEST)/bin/python -m pytest tests/oracle

.PHONY: study test test-newest test-oldest test-oracle test-long
.PHONY: parity oracle-timing subjects docs check format results clean

study: $(VENV)/.installed
	$(RUN) -m experiments study

test: test-oldest test-oracle test-newest

test-newest: $(VENV)/.installed
	$(RUN) $(PYTEST)

# The same suite on the oldest transformers that is supported, with fewer drawn cases, a quarter of
# the cases of each test (one at least), and without what no release of transformers changes.
# Without the option all of it is run.
test-oldest: $(OLDEST)/.installed
	HYPOTHESIS_PROFILE=short $(OLDEST)/bin/python $(PYTEST) --second-transformers

# The same kept sets as kvpress.
test-oracle: $(OLDEST)/.installed
	$(ORACLE)

# docs/parity.md, from such a run.
parity: $(OLDEST)/.installed
	$(ORACLE) --write-parity

# Time inside each press against kvpress, to look at; `make results` measures it too.
oracle-timing: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m tests.oracle.timing

# Where `python -m experiments intrusiveness` finds the libraries that it audits.
subjects: $(SUBJECTS)/.installed $(OLDEST)/.installed

test-long: $(VENV)/.installed
	HYPOTHESIS_PROFILE=long $(RUN) $(PYTEST)

check: $(VENV)/.checks-installed
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports
	$(RUN) -m experiments readme --check
	$(MKDOCS) build --strict --site-dir build/site

# The documentation, at http://127.0.0.1:8000.
docs: $(VENV)/.checks-installed
	$(MKDOCS) serve

format: $(VENV)/.checks-installed
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

# The committed results and all that is written from them, in one run of one commit. What was
# interrupted goes on; `readme --check` fails where results/ are of more than one run.
results: $(VENV)/.installed subjects
	@test -z "$$(git status --porcelain -- . ':!results')" || \
		{ echo "commit first: results come from one commit"; exit 1; }
	$(RUN) -m experiments study --full --overwrite --output results
	$(ORACLE) --write-parity
	$(RUN) -m experiments readme

clean:
	rm -rf $(VENV) $(OLDEST) $(SUBJECTS) study

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --upgrade-deps $(VENV)
	$(RUN) $(PIP) -c constraints.txt -e ".[test,ray]"
	$(RUN) $(IMPORT)
	touch $@

# What only checks and pages need: tests need not wait for it.
$(VENV)/.checks-installed: $(VENV)/.installed
	$(RUN) $(PIP) -c constraints.txt -e ".[dev,docs]"
	touch $@

$(OLDEST)/.installed: pyproject.toml constraints.txt constraints-oldest.txt
	$(PYTHON) -m venv --upgrade-deps $(OLDEST)
	$(OLDEST)/bin/python $(PIP) -c constraints-oldest.txt -e ".[test,oracle]"
	$(OLDEST)/bin/python $(IMPORT)
	touch $@

$(SUBJECTS)/.installed: pyproject.toml constraints.txt constraints-subjects.txt
	$(PYTHON) -m venv --upgrade-deps $(SUBJECTS)
	$(SUBJECTS)/bin/python $(PIP) -c constraints.txt -c constraints-subjects.txt -e ".[study,subjects]"
	touch $@
