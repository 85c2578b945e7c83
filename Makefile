# The commands that people type. Each is a script or a module; this file only names them.
.PHONY: setup demo demo-agent cluster-demo test test-long test-all newcomer pythons chaos torture contracts peers bench curves clean
export PYTHON VLLM

setup:
	@scripts/setup

# A waiting thread spins only shortly: where another process wants a core, spinning on costs ten times the time, and
# sleeping at once costs half as much again where none does.
# KERNEL=vllm generates with vLLM.
demo: VLLM := $(if $(filter vllm,$(KERNEL)),1,$(VLLM))
demo: setup
	GOMP_SPINCOUNT=$${GOMP_SPINCOUNT:-10000} .venv/bin/python examples/demo.py $(if $(KERNEL),--kernel $(KERNEL))

# A model that learns with tools, three seeds; then a game of TextArena, where its package can be installed.
demo-agent: setup
	.venv/bin/python examples/demo_agent_seeds.py
	-scripts/test-environments --collect-only -q > /dev/null
	.venv/bin/python examples/demo_game.py

# Two simulated nodes of a Ray cluster, one of which dies: a minute.
cluster-demo: setup
	OMP_NUM_THREADS=1 .venv/bin/python examples/cluster_demo.py

# APART="browser vllm" leaves these out: .ci/run does, and runs them beside other parts.
# What one runs ten times a day.
test: setup
	scripts/check-and-test

# All that takes minutes, what .ci/run runs in every third turn alone (scripts/ci_parts.py) included.
test-long: setup
	scripts/test -m long
	scripts/test-browser
	scripts/test-vllm
	scripts/test-vllm --long
	scripts/pythons types 3.13
	scripts/test-many

# Property tests draw a third of their examples elsewhere.
test-all: export TEST_EXAMPLES := all
test-all: test test-long newcomer
	scripts/test-environments
	scripts/torture --short
	scripts/chaos short

# The commands of a newcomer, from the built wheel; the same with other Pythons, where they are found.
newcomer: setup
	scripts/newcomer

pythons: setup
	scripts/pythons

chaos: setup
	scripts/chaos

torture: setup
	scripts/torture

# The promises of all operators and losses, each on a hundred examples.
contracts: setup
	CONTRACT_EXAMPLES=100 scripts/test tests/contracts/test_operators_contract.py -m long

# What TRL, verl and OpenRLHF return, recorded for tests/unit/test_peers.py.
peers:
	@scripts/peers

bench: setup
	.venv/bin/python -m benchmarks.check_and_plan --quick
	.venv/bin/python -m benchmarks.price --quick
	.venv/bin/python -m benchmarks.weights --quick
	.venv/bin/python -m benchmarks.coordinator --quick
	.venv/bin/python -m benchmarks.walk --quick
	.venv/bin/python -m benchmarks.overhead --quick
	.venv/bin/python -m benchmarks.overlap --quick
	.venv/bin/python -m benchmarks.across --quick
	.venv/bin/python -m benchmarks.data_plane --quick
	.venv/bin/python -m benchmarks.against_trl --quick
	.venv/bin/python -m benchmarks.agents --quick
	.venv/bin/python -m benchmarks.watch --quick
	.venv/bin/python -m benchmarks.hosts --quick
	.venv/bin/python -m benchmarks.starts --quick
	.venv/bin/python -m benchmarks.published --quick
	.venv/bin/python -m benchmarks.predicted --quick
	.venv/bin/python -m benchmarks.simulate --quick
	.venv/bin/python -m benchmarks.length_ranks --quick
	$(if $(VLLM),.venv/bin/python -m benchmarks.generate --quick)

curves: setup
	.venv/bin/python -m benchmarks.curves --json benchmarks/results/curves.json

clean:
	rm -rf .venv .venv-environments .venv-trl .venv-ray .venv-vllm-range .peers dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find dataflow operators graphs engine tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
