"""FlashInfer's wrappers without a GPU: the same calls, computed by g++ and a plain loop.

What is real: the variant's source as the GPU compiles it, in the parameters that FlashInfer's own
generator declares for it, and the signatures of `plan` and `run`. What is not: the kernel around
them, of which the loop keeps what the backend has to rely on (the order of `LogitsTransform`,
`sm_scale_log2` and powers of two, an LSE in base 2, 0.6's calls beyond the end and its -5e4).
"""

import ctypes
import inspect
import math
import shutil
import subprocess

import torch

from kvtier_kernels.flashinfer_backend.variant import DECLARATION, NAME, SCALARS, TENSORS

# No place in memory: what reads a vote of it dies.
NOWHERE = 1 << 30
TILE = 64
CTYPES = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}

SOURCE = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>
#define __device__
#define __host__
#define __forceinline__ inline
#define REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx,     \
                                  kv_head_idx, ...)                                           \
  template <typename Params, typename T>                                                      \
  T LogitsTransform(const Params& params, T logits, uint32_t batch_idx, uint32_t qo_idx,      \
                    uint32_t kv_idx, uint32_t qo_head_idx, uint32_t kv_head_idx) {            \
    __VA_ARGS__                                                                               \
  }
namespace math { constexpr float log2e = 1.44269504088896340736f; }
struct AttentionVariantBase {};
%(declaration)s
struct Stock : AttentionVariantBase {
  uint32_t qo_len, kv_len;
  float sm_scale_log2;
  template <typename Params>
  Stock(const Params& params, uint32_t batch_idx, uint8_t*) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    sm_scale_log2 = params.sm_scale * math::log2e;
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx,
                            { return logits; })
};
struct Params {
  %(parameters)s
  const int32_t *q_indptr, *kv_indptr;
  uint32_t get_qo_len(uint32_t i) const { return q_indptr[i + 1] - q_indptr[i]; }
  uint32_t get_kv_len(uint32_t i) const { return kv_indptr[i + 1] - kv_indptr[i]; }
};
template <typename Variant, typename Params>
void attend(const Params& params, const float* q, const float* k, const float* v,
            const int64_t* k_stride, const int64_t* v_stride, const int32_t* indices,
            int requests, int heads, int group, int dim, int tile, int causal, float* o,
            float* lse) {
  for (int i = 0; i < requests; ++i) {
    Variant variant(params, i, nullptr);
    const int64_t begin = params.kv_indptr[i], end = (variant.kv_len + tile - 1) / tile * tile;
    for (uint32_t row = 0; row < variant.qo_len; ++row) {
      for (int lane = 0; lane < heads * group; ++lane) {
        const int64_t at = int64_t(params.q_indptr[i] + row) * heads * group + lane;
        std::vector<float> logits;
        std::vector<int32_t> pages;
        float m = -INFINITY;
        for (uint32_t n = 0; n < end; ++n) {
          const bool inside = n < variant.kv_len;
          const int64_t page = inside ? indices[begin + n] : 0;
          float dot = 0;
          for (int d = 0; d < dim && inside; ++d)
            dot += q[at * dim + d] *
                   k[page * k_stride[0] + (lane / group) * k_stride[1] + d * k_stride[2]];
          const float s = variant.LogitsTransform(params, dot, i, row, n, lane, lane / group);
          if (!inside || (causal && n + variant.qo_len > variant.kv_len + row)) continue;
          logits.push_back(s);
          pages.push_back(page);
          m = std::max(m, s);
        }
        std::vector<double> sum(dim, 0.0);
        double total = 0;
        for (size_t n = 0; n < logits.size(); ++n) {
          const double p = std::exp2((double(logits[n]) - m) * variant.sm_scale_log2);
          total += p;
          for (int d = 0; d < dim; ++d)
            sum[d] += p * v[pages[n] * v_stride[0] + (lane / group) * v_stride[1] +
                            d * v_stride[2]];
        }
        for (int d = 0; d < dim; ++d) o[at * dim + d] = total > 0 ? sum[d] / total : 0;
        lse[at] = total > 0 ? m * variant.sm_scale_log2 + std::log2(total) : -5e4;
      }
    }
  }
}
extern "C" void run(int voted, %(arguments)s, const int32_t* q_indptr, const int32_t* kv_indptr,
                    const float* q, const float* k, const float* v, const int64_t* k_stride,
                    const int64_t* v_stride, const int32_t* indices, int requests, int heads,
                    int group, int dim, int tile, int causal, float* o, float* lse) {
  Params params;
  %(setters)s
  params.q_indptr = q_indptr;
  params.kv_indptr = kv_indptr;
  (voted ? attend<%(name)s, Params> : attend<Stock, Params>)(
      params, q, k, v, k_stride, v_stride, indices, requests, heads, group, dim, tile, causal, o,
      lse);
}
"""


def build(folder):
    """The library of SOURCE; needs g++ and FlashInfer's generator."""
    from flashinfer.jit.attention.utils import generate_additional_params

    names = [*TENSORS, *SCALARS]
    types = [f"{type_}*" for type_ in TENSORS.values()] + list(SCALARS.values())
    parameters, _, _ = generate_additional_params(
        list(TENSORS), list(TENSORS.values()), list(SCALARS), list(SCALARS.values())
    )
    source = folder / "attend.cc"
    source.write_text(
        SOURCE
        % {
            "declaration": DECLARATION,
            "name": NAME,
            "parameters": parameters,
            "arguments": ", ".join(f"{t} {n}" for t, n in zip(types, names, strict=True)),
            "setters": " ".join(f"params.{n} = {n};" for n in names),
        }
    )
    library = folder / "attend.so"
    compiler = shutil.which("g++")
    assert compiler is not None, "g++ was looked for before"
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "-o", library, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


class HostWrapper:
    """A wrapper of FlashInfer's for one kind of call; `planned` counts its plans."""

    def __init__(self, compiled, kind):
        import flashinfer

        self.compiled, self.kind, self.planned = compiled, kind, 0
        self.likeness = (
            flashinfer.BatchPrefillWithPagedKVCacheWrapper
            if kind.paged
            else flashinfer.BatchPrefillWithRaggedKVCacheWrapper
        )

    def plan(self, **arguments):
        inspect.signature(self.likeness.plan).bind(self, **arguments)
        self.planned += 1
        self.arguments = arguments
        assert arguments["causal"] is not self.kind.paged
        assert arguments["qo_indptr"].dtype == torch.int32
        if self.kind.paged:
            assert arguments["page_size"] == 1
            self.kv_indptr = arguments["paged_kv_indptr"]
            self.indices = arguments["paged_kv_indices"]
            lengths = self.kv_indptr[1:] - self.kv_indptr[:-1]
            last = arguments["paged_kv_last_page_len"]
            # Both ways of FlashInfer's to count a request's entries.
            assert torch.equal((lengths - 1).clamp(min=0) + last, lengths)
        else:
            self.kv_indptr = arguments["kv_indptr"]
            self.indices = torch.arange(int(self.kv_indptr[-1]), dtype=torch.int32)
        assert self.indices.dtype == self.kv_indptr.dtype == torch.int32

    def run(self, q, *args, out, lse, return_lse):
        bound = {"out": out, "lse": lse, "return_lse": return_lse}
        inspect.signature(self.likeness.run).bind(self, q, *args, **bound)
        if self.kind.paged:
            (k, v), *extra = args
            assert k.shape[1] == 1
            assert k.stride() == v.stride()
            k, v = k[:, 0], v[:, 0]
        else:
            k, v, *extra = args
        planned = self.arguments
        assert q.dtype == planned["q_data_type"]
        assert k.dtype == v.dtype == planned["kv_data_type"]
        heads, dim = planned["num_kv_heads"], planned["head_dim_qk"]
        group = planned["num_qo_heads"] // heads
        assert q.shape == (int(planned["qo_indptr"][-1]), heads * group, dim)
        voted = self.kind.votes is not None
        if voted:
            assert (q.dtype, k.dtype, dim) == self.kind.votes
            votes, slots, *others = extra
            # The entries beyond the last request's end belong to none.
            beyond = torch.full((TILE,), NOWHERE, dtype=torch.int32)
            extra = [votes, torch.cat([slots, beyond]), *others]
            assert math.isclose(extra[-1], planned["sm_scale"])
        else:
            assert not extra
            extra = [None] * (len(TENSORS) + len(SCALARS) - 1) + [planned["sm_scale"]]
        self._run(voted, extra, q.float().contiguous(), k.float(), v.float(), group, out, lse)
        return out, lse

    def _run(self, voted, extra, q, k, v, group, out, lse):
        pointers = [_pointer(x) for x in extra[: len(TENSORS)]]
        scalars = [
            CTYPES[type_](value or 0)
            for type_, value in zip(SCALARS.values(), extra[len(TENSORS) :], strict=True)
        ]
        rows, o = self.arguments["qo_indptr"], torch.empty(q.shape)
        strides = [(ctypes.c_int64 * 3)(*x.stride()) for x in (k, v)]
        tensors = [_pointer(x) for x in (rows, self.kv_indptr, q, k, v)]
        heads, dim = k.shape[1:]
        numbers = (len(rows) - 1, heads, group, dim, TILE, int(not self.kind.paged))
        outcome = [_pointer(o), _pointer(lse)]
        self.compiled.run(
            int(voted), *pointers, *scalars, *tensors, *strides, _pointer(self.indices), *numbers,
            *outcome,
        )  # fmt: skip
        out.copy_(o)


def _pointer(x):
    return ctypes.c_void_p(0 if x is None else x.data_ptr())
