# A small image without a GPU: runs the quickstart, and tries things on a laptop.
#
#   docker build -f docker/cpu.Dockerfile -t ngpt-train:cpu .
#   docker run --rm -v "$PWD/runs:/runs" ngpt-train:cpu train experiment=quickstart run.root=/runs
FROM python:3.12-slim

WORKDIR /opt/ngpt-train
COPY pyproject.toml constraints.txt README.md LICENSE CHANGELOG.md ./
COPY configs configs
COPY ngpt_train ngpt_train
# The CPU build of PyTorch: the other one has gigabytes of CUDA.
RUN python -m pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt .

RUN useradd --create-home --uid 10001 trainer && mkdir -p /runs && chown trainer /runs
USER 10001
WORKDIR /home/trainer
HEALTHCHECK CMD ["python", "-c", "import ngpt_train"]
ENTRYPOINT ["python", "-m", "ngpt_train"]
CMD ["train", "experiment=quickstart", "run.root=/runs"]
