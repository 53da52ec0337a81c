# docker build -f docker/cpu.Dockerfile -t fsd .
# docker run --rm -v fsd-cache:/cache fsd generate --prompt "Why is the sky blue?"
#
# TORCH_INDEX is the index of torch's CPU builds; without it pip takes its default build, which is larger.
FROM python:3.13-slim-bookworm

ARG TORCH_INDEX=""
ENV FSD_CACHE=/cache PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# g++ compiles the CPU kernels on first use, for the processor that runs them
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++=4:12.2.0-3 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY . .
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c requirements.lock '.[serve,guided]' \
    && useradd --create-home --uid 1000 fsd \
    && mkdir /cache && chown fsd /cache

USER 1000
WORKDIR /home/fsd
VOLUME /cache
EXPOSE 8000
ENTRYPOINT ["fsd-infer"]
CMD ["--help"]
