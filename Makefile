# What people and CI call. `make help` lists it. Settings, on the command line:
#   PYTHON=python3.12     the interpreter for .venv (default: the first of python3, python3.13, 3.12, 3.11, 3.14 that will do)
#   EXTRAS=ucx-cu12,nixl-cu12,dev   the extras of pyproject.toml to install (default: ucx-cu13,nixl,dev)
#   TORCH_INDEX=URL       take torch from this package index; with PyTorch's CPU index, a machine without a GPU is spared
#                         gigabytes of CUDA libraries
#   JOBS="nodes faults"   the jobs of `make test-cluster`, each a folder of tests/cluster (default: all)
#   SIDE_BY_SIDE=4        how many of them run at once (default: 2)
#   DEMO_ARGS, TEST_ARGS, BENCH_ARGS, MUTATION_ARGS, MODEL_ARGS, RDMA_ARGS    passed on to `kvferry demo` or `demo-cluster`, pytest, the
#                         benchmarks, the mutation check, the model check and the guest of `make test-rdma`
#   MINUTES=10            how long `make fuzz` searches, all targets together; FUZZ_ARGS: passed on to it

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
PROTO_TOOLS := grpcio-tools==1.66.2 mypy-protobuf==3.6.0 buf-bin==1.75.0

.PHONY: help setup demo demo-cluster test test-cluster check-deploy test-all test-gpu test-rdma test-vllm test-sglang check lint types spelling docs docs-check proto proto-check proto-lint coverage mutation bench fuzz model clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@sed -n '/^# What/,/^$$/s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## create .venv and install kvferry into it (does nothing when that is up to date)
	@:

# Settings that are given count also where .venv is there already.
ifneq ($(filter command,$(origin EXTRAS) $(origin TORCH_INDEX)),)
.PHONY: $(STAMP)
endif

$(STAMP): pyproject.toml constraints.txt .ci/setup
	@PYTHON="$(PYTHON)" EXTRAS="$(EXTRAS)" TORCH_INDEX="$(TORCH_INDEX)" bash .ci/setup
	@touch $@

demo: setup ## both tiers on this machine: prompts in, tokens out, proof and report
	@$(BIN)/kvferry demo $(DEMO_ARGS)

demo-cluster: setup ## two nodes in each tier under load, watched by Prometheus where there is one
	@$(BIN)/kvferry demo-cluster $(DEMO_ARGS)

# Three workers: one runs clusters and waits for them most of the time.
test: setup ## what CI runs: logic, protocol, kernels, storage, one cluster
	@$(BIN)/python -m pytest -n 3 --dist loadfile $(TEST_ARGS)

test-cluster: setup ## whatever else starts processes, networks or faults; JOBS run side by side
	@bash .ci/tools etcd
	@$(MAKE) --no-print-directory --keep-going --output-sync=target --jobs=$(SIDE_BY_SIDE) $(JOBS:%=test-cluster-%)

test-cluster-%: setup
	@echo "job $*:"; $(BIN)/python -m pytest --quiet tests/cluster/$* $(TEST_ARGS)

check-deploy: setup ## manifests, dashboards, alerts and the status page, with the tools that they are for
	@bash .ci/tools deploy
	@$(BIN)/python -m pytest tests/deploy $(TEST_ARGS)

test-all: ## the three above, one after the other
	@$(MAKE) --no-print-directory --keep-going test test-cluster check-deploy

# One process per file: a file leaves the next one the whole GPU.
test-gpu: setup ## kernels, engines and nodes on an NVIDIA GPU, one file after another
	@failed=""; for file in tests/gpu/test_*.py; do $(BIN)/python -m pytest --quiet "$$file" $(TEST_ARGS) || failed="$$failed $$file"; done; \
	[ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

test-rdma: setup ## transports and a transfer over RDMA verbs, in a guest with soft-RoCE; needs QEMU
	@$(BIN)/python tests/rdma/boot.py $(RDMA_ARGS) $(TEST_ARGS)

# In an environment of its own, for vLLM pins much of what it needs; so without .venv.
test-vllm: ## real vLLM servers on the CPU; makes their environment in .kvferry, once, in minutes; needs Python 3.11
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" bash tests/vllm/setup.sh
	@.kvferry/vllm-venv/bin/python -m pytest tests/vllm $(TEST_ARGS)

test-sglang: setup ## two real SGLang engines on the CPU, KV by kvferry; installs SGLang into an environment of its own
	@TORCH_INDEX="$(TORCH_INDEX)" bash tests/sglang/setup.sh
	@$(BIN)/python -m pytest tests/sglang/served.py $(TEST_ARGS)

check: setup lint types spelling docs-check proto-check proto-lint coverage ## lint, format, types, spelling, documents, stubs; every branch of the pure core

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

spelling: setup
	$(BIN)/codespell

# The pure core and the protocol machines, by their own tests alone: a branch that no test takes is a rule that nobody has written.
CORE_TESTS := tests/unit/test_{layout,layer_groups,chunk,piece_size,ring,ring_index,messages,page_allocator,instance,breaker,model_shape,model_directory,plan}.py \
	tests/protocol/test_{sender,sender_direct,receiver,rules,hostile_decode,ring_rules}.py tests/decode/test_admission.py tests/prefill/test_{scheduler,stored_prefix}.py tests/storage/test_keys.py \
	tests/offload/test_{host_tier,jobs,placing,rules,sizes,tiered_request}.py
CORE := transfer/layout.py,transfer/layer_groups.py,transfer/chunk.py,transfer/piece_size.py,transfer/ring.py,transfer/ring_index.py,transfer/messages.py,$\
	transfer/page_allocator.py,transfer/instance.py,transfer/breaker.py,transfer/storage/halving.py,transfer/storage/keys.py,transfer/storage/pages.py,$\
	transfer/memory/config_fields.py,transfer/memory/model_*.py,transfer/memory/plan*.py,transfer/memory/workspace.py,$\
	decode_node/offload/device_index.py,decode_node/offload/host_tier.py,decode_node/offload/jobs.py,decode_node/offload/rules.py,$\
	decode_node/offload/placing.py,decode_node/offload/sizes.py,decode_node/offload/tiered_request.py,$\
	decode_node/admission.py,decode_node/receiver.py,decode_node/receiver_events.py,decode_node/receiver_state.py,$\
	prefill_node/scheduler.py,prefill_node/stored_prefix.py,prefill_node/prefix_pages.py,prefill_node/sender.py,prefill_node/sender_events.py,prefill_node/sender_state.py

coverage: setup ## every branch of the pure core is taken by a test
	@$(BIN)/python -m pytest -q -n 2 $(CORE_TESTS) --cov --cov-branch --cov-report=
	@$(BIN)/coverage report --skip-covered --show-missing --fail-under=100 --include='$(CORE)'

mutation: setup ## delete each statement of ring, sender, receiver and their state: does a test notice? (half an hour)
	@$(BIN)/python -m tests.mutation.deletions $(MUTATION_ARGS)

bench: setup ## the benchmarks; they record hardware, command and numbers
	@$(BIN)/python -m bench $(BENCH_ARGS)

# At the lowest priority: it takes whatever a core has left, for as long as it is given.
fuzz: setup ## hostile input to every decoder and both protocol machines; needs the extra `fuzz`
	@nice -n 19 $(BIN)/python -m fuzz --minutes $(MINUTES) $(FUZZ_ARGS)

# Of Python only what comes with it, so no .venv; spin and gcc are asked for, and never installed.
model: ## the protocol's models (docs/models), every state of each; needs spin and gcc
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

proto-check: $(PROTO_STAMP) # the committed stubs are those that proto/ gives
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; $(call generate_stubs,"$$fresh"); \
	diff -r -u -x '__pycache__' -x '__init__.py' transfer/pb "$$fresh/transfer/pb" > "$$fresh/diff" \
	|| { head -n 40 "$$fresh/diff"; echo "transfer/pb is not what proto/ generates: run 'make proto' and commit the result" >&2; exit 1; }

proto-lint: $(PROTO_STAMP) # its form, and that nothing that the last release speaks has changed its meaning
	$(PROTO_VENV)/bin/buf lint proto
	$(PROTO_VENV)/bin/buf breaking proto --against "$$(ls proto/released/*.binpb)"

docs: setup ## write the tables, dashboards, alert rules and manifests that repeat the code
	@$(BIN)/python -m docs.tables --write

docs-check: setup # what make docs writes is committed
	@$(BIN)/python -m docs.tables --check

clean: ## remove .venv, tools, caches and build outputs (not model folders made by hand)
	rm -rf .venv $(PROTO_VENV) .kvferry/rdma .kvferry/vllm-venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
