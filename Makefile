# Needs make and Python >= 3.11, nothing else: the first target that wants packages installs them in .venv.
PYTHON ?= python3
VENV   ?= .venv
OUT    ?= build
JOBS   ?= 2

BIN       := $(VENV)/bin
NOTEBOOKS := $(sort $(wildcard notebooks/*.ipynb))

.PHONY: help reproduce live findings film site links notebooks lab voila test test-slow lint bench gpu clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

# One stamp for each set of extras, out of date when pyproject.toml or constraints.txt changes. A fresh machine gets the
# versions that the tests have passed with.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "normlab needs Python 3.11 or newer; point to one with: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "python -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; rm -rf $(VENV); exit 1; }

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$*]'
	@touch $@

reproduce: $(VENV)/.installed-notebooks ## train the tiny sweep, run the notebooks on it, write them as HTML to build/
	$(BIN)/normlab sweep --preset tiny --out $(OUT)/runs --cache-dir $(OUT)/cache
	$(PAGES) --runs $(OUT)/runs --out $(OUT)
	@echo; echo "Done. Open in a browser: $(CURDIR)/$(OUT)/index.html"
	@echo "The runs behind it, as tables with their manifests: $(OUT)/runs"

live: $(VENV)/.installed-notebooks ## trained models in a page that changes their normalization: build/live/, without training
	$(BIN)/normlab page pre_rmsnorm-d8 lns-d8 bhyt-d8 rmsnorm_gain-d8 --out $(OUT)/live

findings: $(VENV)/.installed-docs ## write the numbers of README.md, data/README.md and docs/, from the shipped tables; then the pictures of docs/, by a Chrome or Chromium
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/pictures.py

film: $(VENV)/.installed-test ## the moving picture of README.md, by a Chrome or Chromium
	$(BIN)/python docs/moving.py

# Each notebook is executed, and what was executed becomes a page; plotly.js and the explorer are shared by all pages.
PAGES = $(BIN)/python -m normlab.notebook.pages notebooks --shipped data/grid --jobs $(JOBS)

# What was executed before is not executed again unless the notebook or its runs have changed: remove build/shipped to
# have it so.
site: $(VENV)/.installed-docs ## the documentation, the notebooks and the explorer on the shipped runs, as one web site: build/site/
	$(PAGES) --runs data/grid --out $(OUT)/site/notebooks --executed $(OUT)/shipped --keep
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --write-all --fresh-env -d $(OUT)/doctrees docs $(OUT)/site
	@echo "Open $(CURDIR)/$(OUT)/site/index.html, or put $(OUT)/site on any web server."

links: $(VENV)/.installed-docs ## ask every address that the documentation links to
	$(BIN)/python -m sphinx -b linkcheck --quiet -d $(OUT)/doctrees docs $(OUT)/links

notebooks: $(VENV)/.installed-notebooks ## run the notebooks on the shipped runs and keep their figures as images, as they are committed
	@mkdir -p $(OUT)
	@for name in $(basename $(notdir $(NOTEBOOKS))); do \
	  $(BIN)/papermill --cwd notebooks --log-level WARNING -p IMAGES True notebooks/$$name.ipynb $(OUT)/$$name.ipynb && \
	  $(BIN)/python -m nbconvert --to normlab.notebook.exporters.ImageNotebook --log-level WARN --output-dir notebooks \
	    $(OUT)/$$name.ipynb || exit 1; \
	done

lab: $(VENV)/.installed-notebooks ## open JupyterLab on the notebooks
	$(BIN)/jupyter lab --notebook-dir notebooks

voila: $(VENV)/.installed-notebooks ## serve the explorer alone, as a page of controls and plots without code
	$(BIN)/voila notebooks/03_norm_explorer.ipynb "--Voila.tornado_settings={'allow_remote_access': False}"

# Triton decides at import whether it interprets, so the kernels are tested interpreted in processes of their own. The second
# run has everything else, and its summary comes last; of the kernels' tests it leaves out those of a kernel itself (marked
# `kernels`), and the first leaves out those for which the interpreter makes no difference (marked `once`).
test: $(VENV)/.installed-test ## the tests, without the slow ones
	@failed=0; \
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) kernels || failed=1; \
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal kernels tests || failed=1; \
	exit $$failed

test-slow: $(VENV)/.installed-test ## the slow tests
	@failed=0; \
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) -m slow kernels || failed=1; \
	$(BIN)/python -m pytest -n $(JOBS) -m slow tests || failed=1; \
	exit $$failed

bench: $(VENV)/.installed-test ## time whole training steps, then each norm, on the CPU; quiet machines only
	@mkdir -p $(OUT)/bench
	$(BIN)/normlab bench --out $(OUT)/bench/training.csv --cache-dir $(OUT)/cache
	$(BIN)/python -m benchmarks.scheme_steps --out $(OUT)/bench/scheme_steps.csv
	$(BIN)/python -m benchmarks.probes --out $(OUT)/bench/probes_cpu.csv
	$(BIN)/python -m benchmarks.experiments --out $(OUT)/bench/experiments_cpu.csv
	$(BIN)/python -m benchmarks.observer --out $(OUT)/bench/observer_cpu.csv
	$(BIN)/python -m benchmarks.clusters --out $(OUT)/bench/ray_workers.csv --cache-dir $(OUT)/cache
	$(BIN)/python kernels/benchmarks/run.py --device cpu --sections rows host --out $(OUT)/bench
	$(BIN)/python -m benchmarks.latency data/grid --out $(OUT)/bench/latency.csv

# With the packages that are there, PYTHON's if it is given: a GPU machine has its own torch and often no network.
GPU_PYTHON = $(if $(and $(filter file,$(origin PYTHON)),$(wildcard $(BIN)/python)),$(BIN)/python,$(PYTHON))

gpu: ## on a CUDA machine: test the kernels, then measure them against every installed peer; MINUTES=8 stops in time
	PYTHONPATH="$(CURDIR)/kernels:$(CURDIR)" $(GPU_PYTHON) kernels/benchmarks/run.py --tests \
	  $(if $(MINUTES),--minutes $(MINUTES)) --out $(OUT)/bench

lint: $(VENV)/.installed-test ## ruff, the floors (import-linter), mypy, and whether pages say what the data say
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check

clean: ## remove what make wrote, but not the virtual environment
	rm -rf $(OUT) .pytest_cache .mypy_cache .ruff_cache
