# The server, `agl server`: store and gateway, with SQLite in /data or PostgreSQL by --store. No torch.
#   docker build -t agentlightning .
#   docker run -e AGL_KEY=… -p 127.0.0.1:8123:8123 -v agl-data:/data agentlightning
FROM python:3.12-slim AS build
WORKDIR /src
RUN python -m venv /opt/agl
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY examples/flight examples/flight
COPY agentlightning agentlightning
RUN /opt/agl/bin/pip install --no-cache-dir --disable-pip-version-check \
    --constraint constraints.txt ".[server,postgres]"

FROM python:3.12-slim
# A fixed id, so that files in a mounted directory have an owner that can be named.
RUN useradd --uid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin agl \
    && install --directory --owner agl --group agl /data
COPY --from=build /opt/agl /opt/agl
ENV PATH=/opt/agl/bin:$PATH PYTHONUNBUFFERED=1
USER agl
WORKDIR /data
VOLUME /data
EXPOSE 8123
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8123/health', timeout=4)"]
ENTRYPOINT ["agl", "server", "--host", "0.0.0.0", "--port", "8123"]
CMD ["--store", "/data/agentlightning.sqlite"]
