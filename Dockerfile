# kinject in a container: for CPUs by default, for NVIDIA GPUs with --build-arg TORCH=cuda (docker run --gpus all).
#   docker build -t kinject .
#   docker run --rm -v "$PWD:/data" --user "$(id -u):$(id -g)" kinject demo
# 3.11: the Python that the tests run with.
FROM python:3.11-slim
ARG TORCH=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
COPY constraints.txt ./
# torch first: this layer, the largest, stays while kinject changes. PyPI's torch brings CUDA; the CPU build is on PyTorch's own index.
RUN case "$TORCH" in \
      cpu) index=https://download.pytorch.org/whl/cpu ;; \
      cuda) index=https://pypi.org/simple ;; \
      *) echo "TORCH: found $TORCH, allowed: cpu, cuda" >&2; exit 2 ;; \
    esac \
    && pip install -c constraints.txt --extra-index-url "$index" torch
COPY LICENSE README.md pyproject.toml ./
COPY recipes recipes
COPY src src
RUN pip install -c constraints.txt '.[documents]'
# Any user may run it: caches go where that user can write, and torch asks for the name of a user that /etc/passwd may not have.
ENV HOME=/tmp USER=kinject HF_HOME=/data/.cache/huggingface MPLCONFIGDIR=/tmp/matplotlib
WORKDIR /data
ENTRYPOINT ["kinject"]
