# A detector over HTTP:
#   docker build -t kedge .
#   docker run -p 8000:8000 -v "$PWD/detector.kedge:/detector.kedge:ro" kedge
# Where wheels come from another index, name it: docker build --build-arg PIP_INDEX_URL=... -t kedge .
FROM python:3.11-slim

ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL

WORKDIR /kedge
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir --disable-pip-version-check -c constraints.txt ".[serve,score]" \
    && useradd --create-home --uid 10001 kedge

USER kedge
WORKDIR /home/kedge
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]

ENTRYPOINT ["kedge"]
CMD ["serve", "/detector.kedge", "--host", "0.0.0.0"]
