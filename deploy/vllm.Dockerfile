# vLLM's image with kvferry in its environment. From the root of the repository:
#   docker build -f deploy/vllm.Dockerfile -t kvferry-vllm:VERSION .
# The tag of vLLM's image must be one that the connector supports (docs/support.md).

ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${VLLM_IMAGE}
ARG VERSION=0.2.0.dev0
LABEL org.opencontainers.image.title="kvferry-vllm" \
      org.opencontainers.image.description="vLLM with kvferry's connector" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /build
COPY pyproject.toml setup.py README.md LICENSE ./
COPY transfer transfer
COPY planner planner
COPY node_runtime node_runtime
COPY embedded_engine embedded_engine
COPY prefill_node prefill_node
COPY decode_node decode_node
COPY kvferry kvferry
# What vLLM's image has stays at its version, torch above all.
RUN python3 -m pip freeze --exclude-editable | grep -E '^[A-Za-z0-9._-]+==' > /tmp/present.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/present.txt ".[nixl,cuda-ipc]" \
    && python3 -c 'import kvferry, transfer.copy._host_copy' \
    && rm -rf /build /tmp/present.txt \
    && groupadd --gid 10001 kvferry \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin kvferry
WORKDIR /
ENV HOME=/tmp
USER 10001:10001
EXPOSE 8000 7100 7180
ENTRYPOINT []
CMD ["vllm", "--help"]
