"""Tests of the adapters; run with `python -m pytest` from the repository.

TRL's environment skips those of verl and OpenRLHF. To run them, put the packages into a folder next to it:

    pip install --no-deps --target hosts verl==0.9.1 openrlhf==0.11.2 tensordict==0.10.0 TransferQueue torchdata
    pip install --target hosts ray hydra-core aiohttp cachetools cloudpickle codetiming fastapi msgspec hjson einops
    pip install --target hosts opentelemetry-api orjson pylatexenc pyvers pyzmq uvicorn py-cpuinfo msgpack
    DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation --target hosts deepspeed==0.19.6
    PYTHONPATH=hosts python -m pytest tests/integrations tests/test_docs.py
"""
