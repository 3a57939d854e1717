# The commands of development. Each builds the environment that it needs. CI runs the same commands (.ci/run).
# Use your own environment with `make test VENV=path`, another interpreter with `make test PYTHON=python3.12`.

PYTHON ?= python3.11
VENV ?= .venv

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input --quiet
INSTALL := $(PIP) install --constraint constraints.txt
# Install this exact torch first and alone: otherwise pip may download another build, with all of CUDA.
TORCH := $(shell grep '^torch==' constraints.txt)

RUNTIME := . plugins/aten plugins/cleanup plugins/cli plugins/onnxruntime plugins/visualize
DEVELOPMENT := plugins/openvino plugins/tensorrt plugins/torchvision plugins/example conformance
PYPROJECTS := pyproject.toml $(wildcard plugins/*/pyproject.toml) conformance/pyproject.toml

.PHONY: help install demo test test-all docs pictures conformance neighborhoods mutants alarms lint format package lowest bench bench-efficientnet bench-ptq bench-targets bench-trained bench-observers bench-training bench-opinfo bench-detection bench-loops breadth breadth-today clean

help:
	@echo "make install  build the environment in .venv, with everything for development"
	@echo "make demo    compress a small network and compare it with the original (examples/digits.py)"
	@echo "make test    run every test that is not marked slow, in at most 8 minutes on two cores"
	@echo "make test-all  run every test, and show the 30 slowest"
	@echo "make docs    build the documentation into build/docs, and check its links"
	@echo "make pictures  measure the facts of the pictures in docs/pictures again, and draw them"
	@echo "make conformance  compare every operator and pass in ONNX Runtime with eager PyTorch"
	@echo "make neighborhoods  look for rewrites of ONNX Runtime that change a precision, at each optimization level"
	@echo "make mutants  count the seeded faults that the conformance suite finds (about 50 minutes)"
	@echo "make alarms  count the failures that the suite reports of correct targets (about 90 minutes)"
	@echo "make lint    check format, lint, types, imports, terms and style"
	@echo "make format  apply the format and the automatic fixes of ruff"
	@echo "make package build sdists and wheels, install them in an empty environment, and run the README's example"
	@echo "make lowest  the same with the lowest versions that pyproject.toml allows, and run tests with them"
	@echo "make bench   run the benchmarks"
	@echo "make bench-efficientnet  compare EfficientNet-Lite0 in float and INT8: accuracy, size, latency"
	@echo "make bench-ptq  compare INT8 with onnxruntime's own quantization and NNCF"
	@echo "make bench-targets  compare INT8 for OpenVINO with NNCF; quantize twenty architectures for OpenVINO and TensorRT"
	@echo "make bench-trained  compare INT8 for networks with trained weights, in both runtimes"
	@echo "make bench-observers  compare the default ranges with those of each observer: on loud samples, and on larger inputs"
	@echo "make bench-training  measure training after compression, pruning and saved files"
	@echo "make bench-opinfo  export a sample of each operator in PyTorch's own test data"
	@echo "make bench-detection  train two detectors on rendered shapes, and compare their mAP in float and INT8"
	@echo "make bench-loops  compare the latency of rolled loops over positions with that of unrolled ones"
	@echo "make breadth compile every architecture of docs/coverage.md, and write that page"
	@echo "make breadth-today  compile a tenth of them in float, another one each day, and compare with the stored results"
	@echo "make clean   remove the environment and the caches"

install: $(VENV)/development.stamp

demo: $(VENV)/runtime.stamp
	$(BIN)/python examples/digits.py

# One thread for each of the two workers: torch's own threads would compete for the cores. Tests use no network.
test: $(VENV)/development.stamp
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(VENV)/development.stamp
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --durations=30

# Warnings are errors, and nothing is downloaded. The silenced note of mkdocs-material advertises another program.
docs: $(VENV)/development.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict
	$(BIN)/python docs/building/check_site.py build/docs

# One thread and fixed seeds: another CPU changes the last digits of some facts at most.
pictures: $(VENV)/development.stamp
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m docs.building.pictures --record

conformance: $(VENV)/development.stamp
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/clika-ref conformance run --target onnxruntime --profile quick --out build/conformance

# Rewrites of ONNX Runtime that change a precision, at each of its optimization levels.
neighborhoods: $(VENV)/development.stamp
	for target in onnxruntime $(addprefix clika_ref_onnxruntime.target:,EXTENDED BASIC UNOPTIMIZED); do \
		OMP_NUM_THREADS=1 $(BIN)/clika-ref conformance run --target $$target --level neighborhoods || exit 1; \
	done

# Tests of the suite itself (docs/conformance.md): too long for each run of CI.
mutants: $(VENV)/development.stamp
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/clika-ref conformance mutants --profile quick --seeds 5
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/clika-ref conformance mutants --profile ci --seeds 1

alarms: $(VENV)/development.stamp
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/clika-ref conformance alarms --profile quick --seeds 10

lint: $(VENV)/development.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m releasing.style

format: $(VENV)/development.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Both create an environment in build/, and install torch into it, which takes two minutes.
package: $(VENV)/development.stamp
	$(BIN)/python -m releasing package

lowest: $(VENV)/development.stamp
	HF_HUB_OFFLINE=1 $(BIN)/python -m releasing lowest

bench: $(VENV)/development.stamp
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks

bench-efficientnet: $(VENV)/development.stamp
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks efficientnet

# Only these benchmarks need NNCF, torchao and the package of the sentence encoder.
bench-ptq: $(VENV)/peers.stamp
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks ptq

bench-targets: $(VENV)/peers.stamp
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks ptq --runtime openvino
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks targets

bench-trained: $(VENV)/trained.stamp
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks trained

bench-observers: $(VENV)/trained.stamp
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks observers

bench-training: $(VENV)/peers.stamp
	$(BIN)/python -m benchmarks qat
	$(BIN)/python -m benchmarks learning-rates
	$(BIN)/python -m benchmarks digits
	$(BIN)/python -m benchmarks pruning
	$(BIN)/python -m benchmarks checkpoints

breadth: $(VENV)/breadth.stamp
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks breadth

breadth-today: $(VENV)/breadth.stamp
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks breadth --today --in-float

bench-opinfo: $(VENV)/breadth.stamp
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks opinfo

# The weights are cached in build/detectors. Training takes up to 5 minutes of processor time for each.
bench-detection: $(VENV)/breadth.stamp
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks detection

bench-loops: $(VENV)/development.stamp
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks loops

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info plugins/*/*.egg-info conformance/*.egg-info

# The stamps are written last, so make repeats an interrupted installation.
# torch installs the setuptools that builds the project, hence no build isolation.
# pip compiles packages to bytecode, but not editable ones: without it, each process would compile them for 0.3 s
# if PYTHONDONTWRITEBYTECODE is set.
$(VENV)/runtime.stamp: $(PYPROJECTS) constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	$(INSTALL) --no-build-isolation $(addprefix --editable ,$(RUNTIME)) scikit-learn
	$(BIN)/python -m compileall -q clika_ref plugins
	touch $@

$(VENV)/development.stamp: $(VENV)/runtime.stamp requirements-dev.txt
	$(INSTALL) --requirement requirements-dev.txt
	$(INSTALL) --no-build-isolation --no-deps $(addprefix --editable ,$(DEVELOPMENT))
	touch $@

$(VENV)/peers.stamp: $(VENV)/development.stamp requirements-peers.txt
	$(INSTALL) --requirement requirements-peers.txt
	touch $@

$(VENV)/trained.stamp: $(VENV)/peers.stamp requirements-trained.txt
	$(INSTALL) --no-deps --requirement requirements-trained.txt
	touch $@

$(VENV)/breadth.stamp: $(VENV)/development.stamp requirements-breadth.txt
	$(INSTALL) --no-deps --requirement requirements-breadth.txt
	touch $@
