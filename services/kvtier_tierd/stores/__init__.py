"""Where blobs live; `base` is the interface, `registry` knows the implementations."""
