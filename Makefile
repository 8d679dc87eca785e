# Each target is a thin call of `python -m lib`, which does the same without make.

PYTHON ?= $(shell command -v python3.11 || echo python3)
SCALE ?= laptop
ONLY ?=
MODEL ?=
ARGS ?=
JOBS ?= 2
IN = .venv/bin/python -m
# pip would make the bytecode on one core; compileall below does it on all
PIP = -m pip -qq --disable-pip-version-check install --no-compile
COMPILE = { $(IN) compileall -q -j 0 -x '/tests/' .venv/lib > /dev/null 2>&1 || true; }
READ_PROJECT = import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
    d = p["project"]; \
    print("\n".join(p["build-system"]["requires"] + d["dependencies"] + d["optional-dependencies"]["test"]))
READ_EXTRA = import sys, tomllib; \
    print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]]))

.PHONY: help replicate lab report verify audit test bench cluster benchmark-tools browser-tools extras lock clean-env

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-17s%s\n", $$1, $$2}' Makefile

replicate: .venv/.installed  ## run the notebooks; SCALE=smoke, laptop, overnight or paper, ONLY="name ..." for some
	@$(IN) lib run --scale $(SCALE) $(if $(ONLY),--only $(ONLY))

lab: .venv/.installed  ## open JupyterLab at the reading guide; ARGS="--no-browser --port 8899" for its own options
	@$(IN) lib lab $(ARGS)

report: .venv/.installed  ## a static site of the results in outputs/SCALE/report, SCALE=laptop by default
	@$(IN) lib report --scale $(SCALE)

verify: .venv/.installed  ## judge the committed tables again, SCALE=laptop by default, and fail where a verdict differs
	@$(IN) lib verify --scale $(SCALE)

audit: .venv/.installed  ## one model's loop contract as a page; MODEL=a hub id or a folder, ARGS="--n 64 ..." for more
	@$(IN) lib audit "$(MODEL)" $(ARGS)

test: .venv/.installed  ## lint, format and all tests, JOBS=2 files at a time
	$(IN) ruff check .
	$(IN) ruff format --check .
	$(IN) pytest tests -n $(JOBS) --dist loadfile --no-loadscope-reorder

bench: .venv/.installed  ## the benchmarks
	@$(IN) tests.bench

cluster: .venv/.installed  ## install ray beside the rest, for --engine ray
	@.venv/bin/python $(PIP) -c requirements.lock -r requirements-cluster.lock && $(COMPILE)

benchmark-tools: .venv/.installed  ## install lm-eval beside the rest, for python -m lib benchmark
	@.venv/bin/python $(PIP) -c requirements.lock -r requirements-benchmark.lock && $(COMPILE)

browser-tools: .venv/.installed  ## install playwright and axe-core beside the rest, for the report's tests in Debian's chromium
	@.venv/bin/python $(PIP) -c requirements.lock -r requirements-browser.lock && $(COMPILE)

extras: .venv/.installed  ## all three of these tools, in one go
	@.venv/bin/python $(PIP) -c requirements.lock $(patsubst %,-r requirements-%.lock,cluster benchmark browser) && $(COMPILE)

lock:  ## resolve pyproject.toml afresh and write requirements.lock and those of the extras
	@rm -rf .lock-env
	@$(PYTHON) -m venv .lock-env
	@.lock-env/bin/python -c '$(READ_PROJECT)' > .lock-env/wanted.txt
	@.lock-env/bin/python $(PIP) -r .lock-env/wanted.txt
	@grep '^#' requirements.lock > .lock-env/lock.txt
	@.lock-env/bin/python -m pip freeze --all --exclude pip > .lock-env/frozen.txt
	@sed 's/+.*//' .lock-env/frozen.txt >> .lock-env/lock.txt
	@mv .lock-env/lock.txt requirements.lock
	@.lock-env/bin/python -c '$(READ_EXTRA)' cluster > .lock-env/wanted.txt
	@.lock-env/bin/python $(PIP) -c requirements.lock -r .lock-env/wanted.txt
	@grep '^#' requirements-cluster.lock > .lock-env/lock.txt
	@.lock-env/bin/python -m pip freeze --all --exclude pip > .lock-env/frozen.txt
	@sed 's/+.*//' .lock-env/frozen.txt | grep -vxFf requirements.lock >> .lock-env/lock.txt
	@mv .lock-env/lock.txt requirements-cluster.lock
	@.lock-env/bin/python -c '$(READ_EXTRA)' benchmark > .lock-env/wanted.txt
	@.lock-env/bin/python $(PIP) -c requirements.lock -r .lock-env/wanted.txt
	@grep '^#' requirements-benchmark.lock > .lock-env/lock.txt
	@.lock-env/bin/python -m pip freeze --all --exclude pip > .lock-env/frozen.txt
	@sed 's/+.*//' .lock-env/frozen.txt | grep -vxFf requirements.lock | grep -vxFf requirements-cluster.lock >> .lock-env/lock.txt
	@mv .lock-env/lock.txt requirements-benchmark.lock
	@.lock-env/bin/python -c '$(READ_EXTRA)' browser > .lock-env/wanted.txt
	@.lock-env/bin/python $(PIP) -c requirements.lock -r .lock-env/wanted.txt
	@grep '^#' requirements-browser.lock > .lock-env/lock.txt
	@.lock-env/bin/python -m pip freeze --all --exclude pip > .lock-env/frozen.txt
	@cat requirements.lock requirements-cluster.lock requirements-benchmark.lock > .lock-env/others.txt
	@sed 's/+.*//' .lock-env/frozen.txt | grep -vxFf .lock-env/others.txt >> .lock-env/lock.txt
	@mv .lock-env/lock.txt requirements-browser.lock
	@rm -rf .lock-env

clean-env:  ## remove the environment
	rm -rf .venv

# The stamp comes last, so an install that was killed is done again; one that failed leaves nothing.
.venv/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	    echo 'Python 3.11 is needed and $(PYTHON) is not it: name one with make PYTHON=/path/to/python3.11.' >&2; \
	    exit 1; }
	@echo 'Making the environment in .venv (some minutes) ...'
	@rm -rf .venv
	@{ $(PYTHON) -m venv .venv \
	    && .venv/bin/python $(PIP) -r requirements.lock \
	    && .venv/bin/python $(PIP) --no-deps --no-build-isolation -e . \
	    && $(COMPILE) \
	    && touch $@; } || { \
	    rm -rf .venv; \
	    echo 'The environment could not be made, and .venv is removed: the reason stands above.' >&2; \
	    exit 1; }
