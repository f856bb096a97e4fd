# SPDX-License-Identifier: Apache-2.0
# A prefill or a decode engine: vllm-ascend's image of the chip, and the wheel. NEVER BUILT on this base: scripts/images.sh
# builds it on Debian.
#   docker build -f examples/docker/engine.Dockerfile --build-arg WHEELS=dist -t vllm-ascend-pd-engine:0.1.0 .
# For Atlas A3: --build-arg BASE=quay.io/ascend/vllm-ascend:v0.30.0rc2-a3
ARG BASE=quay.io/ascend/vllm-ascend:v0.30.0rc2
FROM ${BASE}
ARG WHEELS=dist
COPY ${WHEELS}/vllm_ascend_pd-*.whl /tmp/wheels/
# vllm-ascend, torch_npu and Mooncake are the image's own.
RUN pip install --no-cache-dir --no-deps --no-index --find-links /tmp/wheels "vllm-ascend-pd==0.1.0" && rm -r /tmp/wheels
