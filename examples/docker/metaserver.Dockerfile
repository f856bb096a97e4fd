# SPDX-License-Identifier: Apache-2.0
# The metaserver: no NPU, no torch, no vLLM. NEVER BUILT on this base: scripts/images.sh builds it on Debian. In the
# repository's folder, with release.yml's wheel in dist, or with that of VLLM_ASCEND_PD_OPS=0 pip wheel --no-deps -w dist .
#   docker build -f examples/docker/metaserver.Dockerfile --build-arg WHEELS=dist -t vllm-ascend-pd-metaserver:0.1.0 .
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG WHEELS=dist
COPY ${WHEELS}/vllm_ascend_pd-*.whl /tmp/wheels/
# Two architectures' wheels may lie there: pip takes the one that fits.
RUN pip install --no-cache-dir --find-links /tmp/wheels "vllm-ascend-pd[metaserver]==0.1.0" && rm -r /tmp/wheels \
    && vllm-ascend-pd metaserver --help > /dev/null
USER 10001:10001
EXPOSE 8000 8001
ENTRYPOINT ["vllm-ascend-pd", "metaserver"]
