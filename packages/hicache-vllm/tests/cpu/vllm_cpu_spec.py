"""vLLM 0.32's tiering on a CPU: its own spec with the copy between device and host replaced; for tests.

vLLM's spec makes no worker on a CPU. Everything else (the host region, the manager,
the connector) is vLLM's own.
"""

from __future__ import annotations

import time

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyWorker(OffloadingWorker):
    """Copies blocks between the KV cache and rows of the host region, at once."""

    def __init__(self, kv_caches, blocks_per_chunk, region):
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._blocks = [
            each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in kv_caches.tensors
        ]
        self._rows = [
            region.create_next_worker_view(each.page_size_bytes * blocks_per_chunk)
            for each in kv_caches.tensors
        ]
        self._done = []

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def _copy(self, job_id, blocks, rows, *, to_host):
        started, nbytes = time.monotonic(), 0
        for refs, block, row, part in self._pairs(blocks, rows):
            for ref in refs:
                start = part * self._blocks[ref.tensor_idx].shape[1]
                host = self._rows[ref.tensor_idx][row, start : start + ref.page_size_bytes]
                device = self._blocks[ref.tensor_idx][block, : ref.page_size_bytes]
                (host if to_host else device).copy_(device if to_host else host)
                nbytes += ref.page_size_bytes
        self._done.append(TransferResult(job_id, True, nbytes, max(time.monotonic() - started, 1e-9)))
        return True

    def _pairs(self, blocks, rows):
        """Pair each block with the row, and the part of it, that holds it."""
        first_block = first_row = 0
        for refs, count, index in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            skipped = index % self._blocks_per_chunk
            for i in range(count):
                chunk, part = divmod(skipped + i, self._blocks_per_chunk)
                yield (
                    refs,
                    int(blocks.block_ids[first_block + i]),
                    int(rows.block_ids[first_row + chunk]),
                    part,
                )
            first_block += count
            first_row += -(-(count + skipped) // self._blocks_per_chunk) if count else 0

    def get_finished(self):
        done, self._done = self._done, []
        return done

    def wait(self, job_ids):
        """Copies are done when they are submitted."""

    def shutdown(self):
        self._rows.clear()
        self._blocks.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """TieringOffloadingSpec for the CPU platform."""

    def get_worker(self, kv_caches):
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
