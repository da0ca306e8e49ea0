"""The backend `triton`; `kernels` has the contract's face, the other modules one kernel each."""
