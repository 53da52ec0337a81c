# docker build -f docker/cuda.Dockerfile -t fsd-cuda .
# docker run --rm --gpus all -v fsd-cache:/cache fsd-cuda generate --target MODEL --prompt "Why is the sky blue?"
#
# torch's wheels bring CUDA's libraries. The image needs the driver of its host alone, and a C compiler for Triton.
FROM python:3.13-slim-bookworm

ENV FSD_CACHE=/cache HF_HOME=/cache/huggingface PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++=4:12.2.0-3 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY . .
RUN pip install --no-cache-dir -c requirements.lock '.[train,serve,guided]' \
    && useradd --create-home --uid 1000 fsd \
    && mkdir /cache && chown fsd /cache

USER 1000
WORKDIR /home/fsd
VOLUME /cache
EXPOSE 8000
ENTRYPOINT ["fsd-infer"]
CMD ["--help"]
