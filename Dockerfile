# One image per process family: a gateway or control plane carries no torch.
#   docker build --target base   -t headworks .
#   docker build --target worker -t headworks-worker .
FROM python:3.11-slim AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
COPY requirements/base.lock requirements/
RUN pip install --no-cache-dir -r requirements/base.lock
COPY alembic.ini pyproject.toml ./
COPY core core
COPY store store
COPY text text
COPY artifacts artifacts
COPY migrations migrations
COPY gateway gateway
COPY control_plane control_plane
RUN useradd --system --uid 10001 headworks && mkdir -p /data/models /data/spool /data/journal && chown -R headworks /data
USER headworks
VOLUME /data
CMD ["python", "-m", "gateway"]

FROM base AS worker
USER root
COPY requirements/worker.lock requirements/
RUN pip install --no-cache-dir -r requirements/worker.lock
COPY kernels kernels
COPY worker worker
USER headworks
CMD ["python", "-m", "worker"]

# The command line, for `seed`: it pulls a model and registers it through the admin API.
FROM base AS tools
USER root
COPY requirements/local.lock requirements/
RUN pip install --no-cache-dir -r requirements/local.lock
COPY local local
COPY cli cli
USER headworks
ENTRYPOINT ["python", "-m", "cli"]
