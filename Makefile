# Every target sets up what it needs first; a second time that takes a moment.
.DEFAULT_GOAL := help
.PHONY: bench-scout bench-observer bench-hang bench-progress bench-recovery bench-log-rules bench-signature simulate test-compose help setup setup-tests demo test check clean distclean lock dashboards
.PHONY: metrics-reference alerts audit sbom pictures check-dashboards check-prometheus
# Targets print one after another, whatever -j says: they share the machine's cores.
.NOTPARALLEL:

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest

# Quick ones first: a wrong line is known in seconds, not after the last scenario.
TESTS_QUICK := $(wildcard tests/unit tests/architecture tests/spec)
TESTS_SIMULATION := $(wildcard tests/simulation)
TESTS_WHOLE := $(wildcard tests/fuzz tests/security tests/component tests/history tests/scenarios tests/gpu)

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

setup:
	@./bootstrap.sh

setup-tests:
	@./bootstrap.sh --tests

demo: setup  ## train a model on this machine, break it four ways, watch it recover
	@$(BIN)/outrider demo $(ARGS)

test: check  ## all checks, then every test
	$(PYTEST) $(TESTS_QUICK)
	$(if $(TESTS_SIMULATION),$(PYTEST) $(TESTS_SIMULATION))
	$(if $(TESTS_WHOLE),$(PYTEST) $(TESTS_WHOLE))

check: setup-tests  ## format, lint, types, import contracts, alert rules, dashboards
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	promtool check rules alerts/outrider.rules.yaml
	promtool test rules alerts/outrider.rules.test.yaml
	amtool check-config alerts/alertmanager.yaml
	$(if $(wildcard compose/prometheus.yml),promtool check config --syntax-only compose/prometheus.yml)
	$(BIN)/python -m dashboards.build --check
	$(BIN)/python -m alerts.build --check
	$(BIN)/python -m tools.metrics_reference --check

dashboards: setup  ## write dashboards/*.json from their builders
	$(BIN)/python -m dashboards.build

alerts: setup  ## write alerts/outrider.rules.yaml from its source
	$(BIN)/python -m alerts.build

pictures: setup-tests  ## draw the README's pictures from the tests' hour of history
	$(BIN)/python -W ignore -m tests.history.pictures

tools/grafana_schema/node_modules: tools/grafana_schema/package.json
	cd tools/grafana_schema && npm install --silent --no-audit --no-fund --no-package-lock
	@touch $@

check-dashboards: tools/grafana_schema/node_modules  ## dashboards against schemas made from Grafana's types (needs npm)
	node tools/grafana_schema/check.mjs dashboards/*.json

check-prometheus: setup-tests  ## the same rules and questions on the newest Prometheus of Debian (needs apt)
	tools/newer_prometheus.sh $(or $(SUITE),sid)

metrics-reference: setup  ## write docs/metrics.md from the collectors
	$(BIN)/python -m tools.metrics_reference

lock: setup  ## resolve requirements.lock anew from pyproject.toml
	$(BIN)/python tools/lock.py

audit: setup-tests  ## ask for known vulnerabilities in what requirements.lock pins
	$(BIN)/pip-audit --requirement requirements.lock --no-deps --disable-pip --strict

sbom: setup-tests  ## write build/sbom.cdx.json: every package, its version and licence (CycloneDX)
	$(BIN)/python -m tools.sbom build/sbom.cdx.json

clean:  ## remove caches and run folders
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist .outrider
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## remove the virtual environment as well
	rm -rf .venv *.egg-info

bench-hang: setup  ## every way in which one rank can hold the others up: who is named, how soon
	$(BIN)/python -m benchmarks.hang_table --minutes $(or $(MINUTES),3) --only "$(ONLY)"

bench-observer: setup  ## what is left of an exchange between observers when one dies: Gloo, and ours
	$(BIN)/python -m benchmarks.observer_exchange

bench-recovery: setup  ## kill -9, SIGSTOP and exception of a rank, against torchrun and installed peers
	$(BIN)/python -m benchmarks.recovery --trials $(or $(TRIALS),50) --peer-trials $(or $(PEER_TRIALS),5)

bench-log-rules: setup  ## lines judged per CPU-second, against a loop of re and mtail
	$(BIN)/python -m benchmarks.log_rules --lines $(or $(LINES),300000) --rounds $(or $(ROUNDS),3)

bench-sidecar-idle: setup  ## what a sidecar costs while nothing is wrong, beside node-exporter
	$(BIN)/python -m benchmarks.sidecar_idle --seconds $(or $(SECONDS),60)

bench-progress: setup  ## what publishing progress costs a step, and torn reads
	$(BIN)/python -m benchmarks.progress --pairs $(or $(PAIRS),200)

bench-scout: setup  ## what comparing ranks costs, who is named for 336 corruptions, false verdicts
	$(BIN)/python -m benchmarks.scout_overhead --healthy $(or $(HEALTHY),2000) --large $(or $(LARGE),1)

bench-signature: setup  ## the tensor digest's speed and misses, beside torch's own
	$(BIN)/python -m benchmarks.signature --trials $(or $(TRIALS),6000)

fuzz: setup-tests  ## arbitrary input, and properties, with rolled dice: make fuzz FUZZ_SECONDS=1200
	FUZZ_SECONDS=$(or $(FUZZ_SECONDS),120) $(PYTEST) tests/fuzz tests/unit --timeout 0

simulate: setup  ## the real cores in a simulated world: make simulate SEEDS=25 NODES=64
	$(BIN)/python -m tests.simulation.run --seeds 1-$(or $(SEEDS),25) --nodes $(or $(NODES),64)

test-compose: setup  ## bring the compose stack up, break it, ask Prometheus
	compose/tools/test_compose.sh
