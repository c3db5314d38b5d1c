# For NVIDIA GPUs. The host needs a driver of release 580 or newer (CUDA 13.0) and NVIDIA's container toolkit.
#
#   docker build -t megatron .
#   docker run --rm -it --gpus all --shm-size=8g -v "$PWD/data:/megatron/data" -v "$PWD/runs:/megatron/runs" megatron \
#       ./deepy.py train.py configs/pythia/70m.yml configs/layouts/bf16.yml data.train=data/mine
#
# On several hosts: docs/launching.md, "Containers". The image has the compilers that torch.compile and offloaded optimizers
# call, InfiniBand's user libraries, ssh, pdsh and Open MPI.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1

# System packages have the versions of the pinned image's release. The mirror drops old ones, so they cannot be pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential ca-certificates git ibverbs-providers iproute2 libibverbs1 librdmacm1t64 make numactl openmpi-bin \
        openssh-client openssh-server pdsh python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# 1000 is the image's user `ubuntu`, and the number that most people have. A run needs no root.
RUN mkdir /megatron && chown 1000:1000 /megatron
USER 1000
WORKDIR /megatron

# Packages first: they change less often than the source.
COPY --chown=1000:1000 requirements requirements
RUN requirements/install gpu .venv
COPY --chown=1000:1000 . .
RUN .venv/bin/python -m pip install --no-deps --editable .

ENV PATH=/megatron/.venv/bin:$PATH
EXPOSE 2222
CMD ["bash"]
