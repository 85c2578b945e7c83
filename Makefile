# The commands that people type. Each is a script or a module; this file only names them.
.PHONY: setup demo test bench clean
export PYTHON

setup:
	@scripts/setup

# Waiting threads sleep: where another process wants a core, spinning ones cost ten times the time.
demo: setup
	OMP_WAIT_POLICY=$${OMP_WAIT_POLICY:-passive} .venv/bin/python examples/demo.py

test: setup
	scripts/check
	scripts/test

bench: setup
	.venv/bin/python -m benchmarks.against_trl --quick

clean:
	rm -rf .venv .venv-trl dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find dataflow operators graphs engine tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
