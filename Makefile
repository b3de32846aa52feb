# Targets for people and CI. `make help` lists them. Settings on the command line:
#   PYTHON=python3.12     the interpreter for .venv (default: the first usable one of python3, python3.13, 3.12, 3.11, 3.14)
#   EXTRAS=ucx-cu12,nixl-cu12,dev   the extras of pyproject.toml to install (default: ucx-cu13,nixl,dev)
#   TORCH_INDEX=URL       the package index for torch; PyTorch's CPU index avoids gigabytes of CUDA libraries on a machine
#                         without a GPU
#   JOBS="nodes faults"   the jobs of `make test-cluster`, each a folder of tests/cluster (default: all)
#   SIDE_BY_SIDE=4        the number of jobs that run in parallel (default: 2)
#   DEMO_ARGS             arguments for `kvferry demo` or `kvferry demo-cluster`
#   TEST_ARGS             arguments for pytest
#   BENCH_ARGS, MUTATION_ARGS, MODEL_ARGS, RDMA_ARGS, FUZZ_ARGS    arguments for the benchmarks, the mutation check, the model
#                         check, the guest of `make test-rdma` and the fuzzer
#   MINUTES=10            the time limit of `make fuzz`, for all targets together

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?=
EXTRAS ?= ucx-cu13,nixl,dev
TORCH_INDEX ?=
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
MUTATION_ARGS ?=
JOBS ?= $(notdir $(patsubst %/,%,$(wildcard tests/cluster/[a-z]*/)))
SIDE_BY_SIDE ?= 2
MINUTES ?= 10
FUZZ_ARGS ?=
MODEL_ARGS ?=
RDMA_ARGS ?=

BIN := .venv/bin
STAMP := .venv/.kvferry-setup
PROTO_VENV := .kvferry/proto-venv
PROTO_STAMP := $(PROTO_VENV)/.installed
DOCS_VENV := .kvferry/docs-venv
DOCS_STAMP := $(DOCS_VENV)/.installed
WHEEL_VENV := .kvferry/wheel-venv
WHEEL_STAMP := $(WHEEL_VENV)/.installed
WHEEL_TOOLS := build==1.6.1 twine==7.0.0
PROTO_TOOLS := grpcio-tools==1.66.2 mypy-protobuf==3.6.0 buf-bin==1.75.0

.PHONY: help setup demo demo-cluster test test-cluster check-deploy test-all test-gpu test-rdma test-vllm test-sglang check lint types spelling docs site docs-check proto proto-check proto-lint coverage mutation bench fuzz model wheel clean

help: ## list targets and settings
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@sed -n '/^# Targets/,/^$$/s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## create .venv and install kvferry into it; do nothing if it is up to date
	@:

# Settings on the command line apply even if .venv exists.
ifneq ($(filter command,$(origin EXTRAS) $(origin TORCH_INDEX)),)
.PHONY: $(STAMP)
endif

$(STAMP): pyproject.toml setup.py transfer/copy/_host_copy.c transfer/receive/_signals.c constraints.txt .ci/setup
	@PYTHON="$(PYTHON)" EXTRAS="$(EXTRAS)" TORCH_INDEX="$(TORCH_INDEX)" bash .ci/setup
	@touch $@

demo: setup ## run both tiers on this machine, check the tokens of some prompts and print a report
	@$(BIN)/kvferry demo $(DEMO_ARGS)

demo-cluster: setup ## run two nodes in each tier under load, with Prometheus if it is installed
	@$(BIN)/kvferry demo-cluster $(DEMO_ARGS)

# Three workers, because one of them runs clusters and is mostly idle.
test: setup ## run the tests of CI: logic, protocol, kernels, storage, one cluster
	@$(BIN)/python -m pytest -n 3 --dist loadfile $(TEST_ARGS)

test-cluster: setup ## run all other tests with processes, networks or faults; JOBS run in parallel
	@bash .ci/tools cluster
	@$(MAKE) --no-print-directory --keep-going --output-sync=target --jobs=$(SIDE_BY_SIDE) $(JOBS:%=test-cluster-%)

test-cluster-%: setup
	@echo "job $*:"; $(BIN)/python -m pytest --quiet tests/cluster/$* $(TEST_ARGS)

check-deploy: setup site ## build the site; test manifests, dashboards, alerts and the status page with their own tools and a browser
	@bash .ci/tools deploy
	@$(BIN)/python -m pytest tests/deploy $(TEST_ARGS)

test-all: ## run test, test-cluster and check-deploy, one after the other
	@$(MAKE) --no-print-directory --keep-going test test-cluster check-deploy

# Each file runs in a separate process, so that the whole GPU is free for the next file.
test-gpu: setup ## test kernels, engines and nodes on an NVIDIA GPU, one file after another
	@failed=""; for file in tests/gpu/test_*.py; do $(BIN)/python -m pytest --quiet "$$file" $(TEST_ARGS) || failed="$$failed $$file"; done; \
	[ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

test-rdma: setup ## test transports and a transfer over RDMA verbs in a guest with soft-RoCE; needs QEMU
	@$(BIN)/python tests/rdma/boot.py $(RDMA_ARGS) $(TEST_ARGS)

# Does not depend on .venv: vLLM pins many packages, so it has a separate environment.
test-vllm: ## test real vLLM servers on the CPU; the first run creates their environment in .kvferry; needs Python 3.11
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" bash tests/vllm/setup.sh
	@.kvferry/vllm-venv/bin/python -m pytest tests/vllm $(TEST_ARGS)

test-sglang: setup ## test two real SGLang engines on the CPU with KV from kvferry; installs SGLang into a separate environment
	@TORCH_INDEX="$(TORCH_INDEX)" bash tests/sglang/setup.sh
	@$(BIN)/python -m pytest tests/sglang/served.py $(TEST_ARGS)

check: setup lint types spelling docs-check proto-check proto-lint coverage ## check lint, format, types, spelling, generated text, stubs and branch coverage of the pure core

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Documents also avoid words that are common in code and tests. Words in backquotes do not count.
spelling: setup
	$(BIN)/codespell
	$(BIN)/codespell -D docs/words-of-documents.txt --ignore-regex '`[^`]*`|\(protocol[^)]*\)' README.md deploy/README.md \
		$(filter-out docs/protocol.md docs/seeds.md docs/fuzzing.md,$(wildcard docs/*.md))

# Only their own tests count for the pure core and the state machines. A branch without a test is an undocumented rule.
CORE_TESTS := tests/unit/test_{layout,layer_groups,chunk,piece_size,ring,ring_index,messages,page_allocator,instance,breaker,model_shape,model_directory,plan}.py \
	tests/protocol/test_{sender,sender_direct,staging,receiver,rules,hostile_decode,ring_rules}.py tests/decode/test_{admission,ngram}.py tests/prefill/test_{scheduler,stored_prefix}.py tests/storage/test_keys.py \
	tests/offload/test_{host_tier,jobs,page_placement,rules,sizes,tiered_request}.py
CORE := transfer/layout.py,transfer/layer_groups.py,transfer/chunk.py,transfer/piece.py,transfer/piece_size.py,transfer/ring.py,transfer/ring_index.py,transfer/messages.py,$\
	transfer/pool/page_allocator.py,transfer/instance.py,transfer/breaker.py,transfer/storage/halving.py,transfer/storage/keys.py,transfer/storage/pages.py,$\
	planner/config_fields.py,planner/model_*.py,planner/plan*.py,planner/workspace.py,$\
	decode_node/offload/host_tier.py,decode_node/offload/jobs.py,decode_node/offload/rules.py,$\
	decode_node/offload/page_placement.py,decode_node/offload/sizes.py,decode_node/offload/tiered_request.py,$\
	decode_node/admission.py,decode_node/ngram.py,transfer/session_events.py,transfer/receive/receiver.py,transfer/receive/events.py,transfer/receive/state.py,$\
	prefill_node/scheduler.py,prefill_node/stored_prefix.py,transfer/send/sender.py,transfer/send/events.py,transfer/send/staging_arena.py,transfer/send/state.py

coverage: setup ## check that tests cover every branch of the pure core
	@$(BIN)/python -m pytest -q -n 2 $(CORE_TESTS) --cov --cov-branch --cov-report=
	@$(BIN)/coverage report --skip-covered --show-missing --fail-under=100 --include='$(CORE)'

mutation: setup ## check that tests detect the deletion of each statement of ring, sender, receiver and their state (ten minutes)
	@$(BIN)/python -m tests.mutation.deletions $(MUTATION_ARGS)

bench: setup ## run the benchmarks; they record hardware, command and numbers
	@$(BIN)/python -m bench $(BENCH_ARGS)

# Runs at the lowest priority, so that it uses idle time only.
fuzz: setup ## send hostile input to every decoder and both state machines; needs the extra `fuzz`
	@nice -n 19 $(BIN)/python -m fuzz --minutes $(MINUTES) $(FUZZ_ARGS)

# Uses the standard library only, so it does not depend on .venv. It reports missing spin or gcc, and does not install them.
model: ## check every state of the protocol's models (docs/models); needs spin and gcc
	@$(or $(PYTHON),python3) docs/models/run.py $(MODEL_ARGS)

# Stubs come from the oldest runtime that we support, so that they load under every newer one (docs/adr/0008-committed-stubs.md).
# The tools live apart from .venv because that version of grpcio-tools holds protobuf below 6.
$(PROTO_STAMP): Makefile | $(STAMP)
	@rm -rf $(PROTO_VENV)
	@$(BIN)/python -m venv $(PROTO_VENV)
	@$(PROTO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PROTO_TOOLS)
	@touch $@

# $(call generate_stubs,FOLDER)
generate_stubs = PATH="$(CURDIR)/$(PROTO_VENV)/bin:$$PATH" $(PROTO_VENV)/bin/python -m grpc_tools.protoc -I proto \
	--python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) proto/transfer/pb/*.proto

proto: $(PROTO_STAMP) ## regenerate transfer/pb from proto/
	@$(PROTO_VENV)/bin/buf format --write proto
	@$(call generate_stubs,.)

proto-check: $(PROTO_STAMP) # check that the committed stubs are generated from proto/
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; $(call generate_stubs,"$$fresh"); \
	diff -r -u -x '__pycache__' -x '__init__.py' transfer/pb "$$fresh/transfer/pb" > "$$fresh/diff" \
	|| { head -n 40 "$$fresh/diff"; echo "transfer/pb differs from the stubs of proto/: run 'make proto' and commit the result" >&2; exit 1; }

proto-lint: $(PROTO_STAMP) # check the format of proto/ and its compatibility with the last release
	$(PROTO_VENV)/bin/buf lint proto
	$(PROTO_VENV)/bin/buf breaking proto --against "$$(ls proto/released/*.binpb)"

docs: setup ## write all generated text (tables, dashboards, alert rules, the manifest of the alerts) and build the site
	@$(BIN)/python -m docs.tables --write
	@$(MAKE) --no-print-directory site

# The site needs packages that nothing else needs, so they have a separate environment.
$(DOCS_STAMP): docs/requirements.txt constraints.txt
	@rm -rf $(DOCS_VENV)
	@$(or $(PYTHON),python3) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r docs/requirements.txt
	@touch $@

site: $(DOCS_STAMP) ## build the documentation site in .kvferry/site; warnings are errors
	@bash .ci/tools docs
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict 2>&1 | { grep -v '^INFO' || true; }
	@echo "site: open .kvferry/site/index.html"

docs-check: setup # check that the output of make docs is committed
	@$(BIN)/python -m docs.tables --check

$(WHEEL_STAMP): Makefile
	@rm -rf $(WHEEL_VENV)
	@$(or $(PYTHON),python3) -m venv $(WHEEL_VENV)
	@$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(WHEEL_TOOLS)
	@touch $@

# The extension modules are optional at the installation from source, but a wheel without them would be slow everywhere.
wheel: $(WHEEL_STAMP) ## build the sdist and the wheel into dist/, and check them
	@rm -rf build dist
	@$(WHEEL_VENV)/bin/python -m build --outdir dist . > /dev/null
	@$(WHEEL_VENV)/bin/twine check --strict dist/*
	@for module in copy/_host_copy receive/_signals; do \
	$(WHEEL_VENV)/bin/python -m zipfile --list dist/kvferry-*.whl | grep "transfer/$$module.abi3.so" > /dev/null \
	|| { echo "the wheel has no compiled module: install gcc and Python's headers" >&2; exit 1; }; \
	tar -tzf dist/kvferry-*.tar.gz --wildcards "*/transfer/$$module.c" > /dev/null || exit 1; done
	@ls -l dist

clean: ## remove .venv, tools, caches and build outputs, but no model folders
	rm -rf .venv transfer/copy/*.so transfer/receive/*.so $(PROTO_VENV) $(DOCS_VENV) $(WHEEL_VENV) .kvferry/docs-scripts .kvferry/site .kvferry/rdma .kvferry/vllm-venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
