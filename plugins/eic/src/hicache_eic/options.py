"""The eic backend's options: the caller's, ``HICACHE_EIC_<FIELD>``, or a table in a file::

    [eic]
    url = "eic://10.0.0.7:12500"
    instance_id = "kv-1"
    nic_affinity = true
    gpu_nics = { "cuda:0" = "eth1", "cuda:1" = "eth2" }

What none of these sets is taken from the YAML file that SGLang's users have, where ``yaml`` or the
environment's ``REMOTE_EIC_YAML`` names one.
"""

from __future__ import annotations

import os
import re
from typing import Any

from pydantic import Field, field_validator, model_validator

from hicache_core.options import Options, Size
from hicache_eic.yaml_settings import YAML_VARIABLE, read_yaml

_URL = re.compile(r"eic://(?P<endpoint>[^/\s]+:\d{1,5})/?")
_DEVICE = re.compile(r"cuda:\d+")


class EicOptions(Options):
    """Options of ``eic``."""

    yaml: str | None = Field(
        default=None,
        description="A YAML file with SGLang's settings of EIC; REMOTE_EIC_YAML when not set. Other "
        "options win.",
    )
    url: str = Field(description="The service, eic://host:port (remote_url).")
    instance_id: str = Field(min_length=1, description="The instance's id (eic_instance_id).")
    eic_namespace: str = Field(
        default="",
        description="EIC's own namespace, on every call. EIC takes any name, a wrong one too, and finds "
        "nothing.",
    )
    ttl_s: int | None = Field(
        default=None, ge=1, description="Seconds after which EIC drops a page; never when not set."
    )
    transport_type: int = Field(
        default=3, ge=0, description="EIC's TransportType: 3 GDR, 2 RDMA (eic_trans_type)."
    )
    nic_affinity: bool = Field(
        default=False,
        description="Use the network interfaces that are near (enable_gpu_nic_affinity): of the tables, "
        "or else the nearest by the PCI topology in sysfs.",
    )
    gpu_nics: dict[str, str] = Field(
        default_factory=dict,
        description='Interface a GPU, {"cuda:0": "eth1"} (gpu_nic_affinity_config).',
    )
    cpu_nics: dict[str, str] = Field(
        default_factory=dict,
        description="Interface for host memory, by the GPU that it serves (cpu_nic_affinity_config); it wins "
        "over gpu_nics, since all transfers start from host memory.",
    )
    register_set: bool = Field(
        default=True, description="Register the memory that sets start from (enable_kvset_direct)."
    )
    register_get: bool = Field(
        default=True, description="Register the memory that gets end in (enable_kvget_direct)."
    )
    staging: Size = Field(
        default=64 << 20,
        ge=1 << 16,
        description="Bytes of private memory a worker; a call carries as many pages as fit.",
    )
    workers: int = Field(
        default=4, ge=1, le=64, description="Calls to EIC at once, each on a thread of its own."
    )
    max_keys: int = Field(default=128, ge=1, le=4096, description="Most keys a call to EIC.")
    retries: int = Field(
        default=2,
        ge=0,
        le=10,
        description="Repeats of a key that failed (not of one that is absent), in time.",
    )
    log_dir: str = Field(
        default="", description="Where EIC's client logs to (eic_log_dir); made when missing."
    )
    log_level: int = Field(default=2, ge=0, description="EIC's LogLevel (eic_log_level).")
    flag_file: str = Field(default="", description="EIC's flag file (eic_flag_file).")
    module: str = Field(default="eic", description="The Python module of EIC's client.")

    @model_validator(mode="before")
    @classmethod
    def _with_yaml(cls, given: Any) -> Any:
        path = given.get("yaml") or os.environ.get(YAML_VARIABLE, "")
        return {**read_yaml(path), **given} if path else given

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        if not _URL.fullmatch(url):
            raise ValueError(f'url={url!r} is not a service (try "eic://10.0.0.7:12500")')
        return url

    @field_validator("gpu_nics", "cpu_nics")
    @classmethod
    def _by_device(cls, table: dict[str, str]) -> dict[str, str]:
        wrong = [device for device in table if not _DEVICE.fullmatch(device)]
        if wrong:
            raise ValueError(f'{wrong[0]!r} is no device (try {{"cuda:0": "eth1"}})')
        return table

    @field_validator("module")
    @classmethod
    def _is_module(cls, name: str) -> str:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f'module={name!r} is not a module (try "eic")')
        return name

    @property
    def endpoint(self) -> str:
        """host:port."""
        return self.url.removeprefix("eic://").rstrip("/")
