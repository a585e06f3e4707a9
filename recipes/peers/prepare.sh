#!/usr/bin/env bash
# What `run.py` compares with, into the folder `.peers` of the project: an environment with the MoD package and the
# transformers that it and Router-Tuning's code are written for, and that code at one commit.
set -euo pipefail
cd "$(dirname "$0")/../.."
"${PYTHON:-python3}" -m venv .peers/venv
.peers/venv/bin/pip install -q transformers==4.40.1 "numpy<2" torch==2.13.0 mixture-of-depth==1.2.0
commit=772c16005e05ccdbaf9ddb263a9b8d8b27b47b4b
git clone -q --filter=blob:none --no-checkout \
    "${ROUTER_TUNING:-https://github.com/CASE-Lab-UMD/Router-Tuning-Mixture-of-Depths}" .peers/router-tuning
git -C .peers/router-tuning checkout -q "$commit" -- utils/model
