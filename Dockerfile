# Meshwright on CPUs:  docker build -t meshwright .
# On CUDA, by an image that has torch already (its tag is yours to choose):
#   docker build -t meshwright --build-arg BASE=IMAGE --build-arg TORCH= .
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
RUN if [ -n "${TORCH}" ]; then pip install --no-cache-dir ${TORCH}; fi
WORKDIR /meshwright
COPY . .
RUN pip install --no-cache-dir '.[report,terminal,examples]'
WORKDIR /work
ENV OMP_NUM_THREADS=1
ENTRYPOINT ["meshwright"]
CMD ["--help"]
