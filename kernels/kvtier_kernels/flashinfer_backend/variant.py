"""Votes in FlashInfer: the attention variant that adds an entry's log-votes to its logits.

A variant is told `kv_idx`, an entry's place in its request's list, and not its slot. So it is
given the plan's slot table once more, as tensors of its own:

    slots         int32 [entries]           slots_indptr  int32 [requests + 1]
    log_votes     float32; of slot s and query head h at  s * slot_stride + h * head_stride

This is the one place where scales meet. FlashInfer multiplies what the transform returns by
`sm_scale_log2` and goes on in powers of two, so the transform returns natural logits,
scale * q.k + vote, and `sm_scale_log2` is log2(e). FlashInfer 0.6 calls it for places beyond the
request's end too (and masks what it returned), hence the bound.

Only its FA2 kernels can be asked (FA3 tells a variant that every request is request 0).
"""

from __future__ import annotations

from typing import Any

import torch

NAME = "KvtierVotes"
TENSORS = {"log_votes": "float", "slots": "int32_t", "slots_indptr": "int32_t"}
SCALARS = {"slot_stride": "int64_t", "head_stride": "int64_t", "sm_scale": "double"}
DECLARATION = r"""
struct KvtierVotes : AttentionVariantBase {
  static constexpr bool use_softmax = true;

  uint32_t qo_len, kv_len, window_left;
  float sm_scale, sm_scale_log2;
  const int32_t* own_slots;

  template <typename Params>
  __device__ __host__ KvtierVotes(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    sm_scale = params.sm_scale;
    sm_scale_log2 = math::log2e;
    own_slots = params.slots + params.slots_indptr[batch_idx];
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    float vote = 0.f;
    if (kv_idx < kv_len) {
      vote = params.log_votes[own_slots[kv_idx] * params.slot_stride +
                              qo_head_idx * params.head_stride];
    }
    return logits * sm_scale + vote;
  })
};
"""


def jit_args(q_dtype: torch.dtype, kv_dtype: torch.dtype, dim: int) -> list[Any]:
    """Return the arguments that tell FlashInfer's wrappers and its code generator about the
    variant."""
    names = (str(dtype).removeprefix("torch.") for dtype in (q_dtype, kv_dtype))
    return [
        f"kvtier_votes_{'_'.join(names)}_{dim}",
        q_dtype,
        kv_dtype,
        q_dtype,
        torch.int32,
        dim,
        dim,
        list(TENSORS),
        list(TENSORS.values()),
        list(SCALARS),
        list(SCALARS.values()),
        NAME,
        DECLARATION,
    ]


def run_arguments(
    log_votes: torch.Tensor, slots: torch.Tensor, slots_indptr: torch.Tensor, scale: float
) -> tuple[Any, ...]:
    """The variant's tensors and scalars, in the order in which it declares them.

    log_votes: [slots], or [slots, query heads].
    """
    assert log_votes.dtype == torch.float32, f"log-votes in float32, got {log_votes.dtype}"
    slot_stride, head_stride = (*log_votes.stride(), 0)[:2]
    return log_votes, slots, slots_indptr, slot_stride, head_stride, scale
