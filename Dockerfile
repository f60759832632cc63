# API and former in a container. Workers decode on Macs, outside: Linux containers have no Metal. A worker runs in here
# too, on the CPU, which is good for trying things out.
FROM python:3.12-slim-bookworm

RUN apt-get update \
    && apt-get install -y --no-install-recommends libopenblas0-pthread \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/mtplx
COPY requirements.lock ./
RUN pip install --no-cache-dir --require-hashes -r requirements.lock

COPY LICENSE README.md pyproject.toml mtplx.py ./
COPY api api
COPY broker broker
COPY console console
COPY mtplx_core mtplx_core
COPY workers workers
RUN pip install --no-cache-dir --no-deps .

# Cache and file store are made here, so that volumes mounted on them belong to their user.
RUN useradd --create-home --uid 10001 mtplx \
    && install -d -o mtplx -g mtplx /home/mtplx/.cache/mtplx /home/mtplx/files
USER mtplx
WORKDIR /home/mtplx
ENTRYPOINT ["mtplx"]
CMD ["--help"]
