"""The backend `flashinfer`; `kernels` has the contract's face, `variant` what is compiled."""
