"""The settings that users of SGLang's EIC class already have: a YAML file, named by ``REMOTE_EIC_YAML``.

Its fields are translated into options. What the file sets and this backend has no use for is accepted by
name; any other field is refused, since a setting that is misspelt must not be lost in silence.
"""

from __future__ import annotations

import difflib
import json
from typing import Any

import yaml

YAML_VARIABLE = "REMOTE_EIC_YAML"

#: Field of the YAML -> option. Source: SGLang 0.5.23, mem_cache/storage/eic/eic_storage.py.
_FIELDS = {
    "remote_url": "url",
    "eic_instance_id": "instance_id",
    "eic_log_dir": "log_dir",
    "eic_log_level": "log_level",
    "eic_trans_type": "transport_type",
    "eic_flag_file": "flag_file",
    "eic_namespace": "eic_namespace",
    "enable_kvset_direct": "register_set",
    "enable_kvget_direct": "register_get",
    "enable_gpu_nic_affinity": "nic_affinity",
    "gpu_nic_affinity_config": "gpu_nics",
    "cpu_nic_affinity_config": "cpu_nics",
}
#: Of no use here: transfers start from host memory, and this backend has its own threads.
_UNUSED = frozenset({"eic_thread_num", "enable_kvset_gpu_direct", "enable_kvget_gpu_direct"})
_TABLES = frozenset({"gpu_nic_affinity_config", "cpu_nic_affinity_config"})


def read_yaml(path: str) -> dict[str, Any]:
    """Give the options that a YAML file sets.

    Raises: ValueError, naming the file, the field and what to write.
    """
    try:
        with open(path, encoding="utf-8") as file:
            document = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"the file {path!r} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise ValueError(
            f"the file {path!r} holds no settings; write lines such as: remote_url: eic://host:port"
        )
    found: dict[str, Any] = {}
    for name, value in document.items():
        if name in _UNUSED or value is None:
            continue
        if name not in _FIELDS:
            close = difflib.get_close_matches(str(name), [*_FIELDS, *_UNUSED], n=1)
            raise ValueError(f"{name} in {path!r} is unknown{f' ({close[0]}?)' if close else ''}")
        found[_FIELDS[name]] = _table(path, name, value) if name in _TABLES else value
    return found


def _table(path: str, name: str, value: Any) -> Any:
    """Tables are JSON in a string there."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        complaint = f'{name} in {path!r} is not JSON ({error}); write \'{{"cuda:0": "eth1"}}\''
        raise ValueError(complaint) from error
