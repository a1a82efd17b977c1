# Tandem and what it needs, for the CPU or for NVIDIA's GPUs:
#
#     docker build -t tandem .
#     docker build -t tandem:cuda --build-arg DEVICE=cuda .
#
# The first stage makes a wheel, with no compiler of the system's; the second one has no sources.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS wheel
WORKDIR /src
COPY . .
RUN wheels/build.sh /wheels python3

FROM python:${PYTHON}-slim-bookworm
ARG DEVICE=cpu
# Where pip finds torch for the CPU; a GPU's comes from the usual index, with CUDA in it.
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Triton compiles its kernels where they run, with a C compiler.
RUN if [ "$DEVICE" = cuda ]; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
      && rm -rf /var/lib/apt/lists/*; \
    fi
RUN if [ "$DEVICE" = cuda ]; then pip install torch==2.13.0; \
    else pip install torch==2.13.0 --index-url "$CPU_INDEX"; fi
COPY --from=wheel /wheels /wheels
RUN pip install --no-index --no-deps --find-links /wheels tandem-moe \
    && pip install "tandem-moe[demo,images,server]" \
    && rm -rf /wheels
# Not root; models and packed copies lie in a volume that outlives the container.
RUN useradd --create-home tandem && mkdir /cache && chown tandem /cache
USER tandem
ENV HF_HOME=/cache/huggingface TANDEM_CACHE=/cache/tandem
VOLUME /cache
EXPOSE 8000
ENTRYPOINT ["tandem"]
CMD ["--help"]
