"""The state of a service for its operators: metrics, and whether it is alive and ready."""
