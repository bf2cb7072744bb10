# Images of jzero, without a compiler and without root. The context is the root of a clone.
#
#   docker build --target tpu -t "$REGISTRY/jzero:tpu" .      also --target cuda and --target cpu
#   docker run --rm "$REGISTRY/jzero:cpu" python -m jzero.main --help
#
# CUDA comes with JAX's wheels: the host needs NVIDIA's driver and container toolkit alone.
# On Python 3.12: --build-arg PYTHON=3.12 --build-arg CONSTRAINTS=constraints-3.12.txt

ARG PYTHON=3.11
ARG CONSTRAINTS=constraints.txt

# -- what all images have: the user, and the names of the dependencies without the code -------------
FROM python:${PYTHON}-slim AS base
ARG CONSTRAINTS
# A first process without a handler ignores SIGTERM; tini passes it on to jzero from the start.
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --create-home jzero && install -d -o jzero -g jzero /runs
WORKDIR /opt/jzero
# Code that changes comes after the dependencies, so that these are installed once.
COPY pyproject.toml setup.py README.md LICENSE ./
COPY ${CONSTRAINTS} constraints-image.txt
RUN install -D /dev/null jzero/__init__.py && mkdir configs
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# -- the dependencies of each kind of device -------------------------------------------------------
FROM base AS dependencies-cpu
RUN pip install -c constraints-image.txt -e .

FROM base AS dependencies-cuda
RUN pip install -c constraints-image.txt -e '.[cuda12]'
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM base AS dependencies-tpu
RUN pip install -c constraints-image.txt -e '.[tpu]'

# -- the images ------------------------------------------------------------------------------------
FROM dependencies-cuda AS cuda
ENV JAX_PLATFORMS=cuda,cpu
COPY jzero jzero
COPY configs configs
COPY benchmarks benchmarks
USER 1000
VOLUME /runs
ENTRYPOINT ["tini", "--"]
CMD ["python", "-m", "jzero.main", "--help"]

FROM dependencies-tpu AS tpu
ENV JAX_PLATFORMS=tpu,cpu
COPY jzero jzero
COPY configs configs
COPY benchmarks benchmarks
USER 1000
VOLUME /runs
ENTRYPOINT ["tini", "--"]
CMD ["python", "-m", "jzero.main", "--help"]

FROM dependencies-cpu AS cpu
ENV JAX_PLATFORMS=cpu
COPY jzero jzero
COPY configs configs
COPY benchmarks benchmarks
USER 1000
VOLUME /runs
ENTRYPOINT ["tini", "--"]
CMD ["python", "-m", "jzero.main", "--help"]
